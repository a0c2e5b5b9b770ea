"""The training loop under faults: kills, damage, divergence, wrong requests; and two
processes against one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training_world import Encoder, draw

import pcl
from pcl.checkpoints import CheckpointError, Run, read_checkpoint
from pcl.devices import connect
from pcl.encoders import SphereEncoder
from pcl.losses import ExactInfoNCE, ExactNWJ, InfoNCE, MCInfoNCE
from pcl.objectives import (
    ByLabel,
    Classify,
    Contrast,
    Learns,
    Objective,
    encoder_groups,
    parameter_groups,
    parts_of,
)
from pcl.training import (
    Config,
    Diverged,
    Epochs,
    make_optimizer,
    rate_factor,
    set_modes,
    set_rates,
    train,
)
from pcl.training import (
    train_encoder as fit,
)
from pcl.vmf import VonMisesFisher

TINY = Config(steps=30, batch_size=16, log_every=7, kappa_from=0.2)


def weights(encoder: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in encoder.parameters()])


def python(tmp_path: Path, code: str, *words: str, timeout: float = 600) -> str:
    """Run a script in a process of its own, without the launcher variables of an
    earlier one; return what it prints."""
    script = tmp_path / "script.py"
    script.write_text(code)
    launcher = (
        "LOCAL_RANK",
        "NODE_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
    )
    env = {name: value for name, value in os.environ.items() if name not in launcher}
    paths = [
        str(Path(pcl.__file__).parent.parent),
        str(Path(__file__).parent),
        env.get("PYTHONPATH", ""),
    ]
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, str(script), *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- killed and resumed
# --------------------------------------------------------------------------------------------

KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from pcl.losses import MCInfoNCE
from pcl.checkpoints import read_checkpoint
from pcl.training import Config, train_encoder as fit
from training_world import Encoder, draw

config = Config(steps=150, batch_size=8, n_neg=2, n_neg_frozen=0, log_every=9, kappa_from=0.3, seed=4)
whole, broken = map(Path, sys.argv[1:])
rng = random.Random(0)

def train(file):
    fit(Encoder(), MCInfoNCE(5.0, 4), draw, config, checkpoint=file, checkpoint_every=1)

train(whole)
pace = read_checkpoint(whole)["run"]["seconds"] / config.steps
reached = []
for attempt in range(12):
    child = os.fork()
    if child == 0:
        train(broken)
        os._exit(0)
    time.sleep(rng.uniform(0, 20) * pace)
    os.kill(child, signal.SIGKILL)
    if os.waitpid(child, 0)[1] == signal.SIGKILL and broken.exists():
        reached.append(read_checkpoint(broken)["run"]["step"])
train(broken)
print(*reached)
"""


def test_sigkill_at_any_moment_changes_no_bit(tmp_path: Path) -> None:
    """A checkpoint after every step, so that many kills fall into a write; the loss
    draws samples of its own."""
    whole, broken = tmp_path / "whole.pt", tmp_path / "broken.pt"
    reached = [
        int(word) for word in python(tmp_path, KILLED, str(whole), str(broken)).split()
    ]
    assert len([step for step in set(reached) if 0 < step < 150]) >= 3, (
        f"too few kills in mid-run: {reached}"
    )
    a, b = read_checkpoint(whole), read_checkpoint(broken)
    assert a["run"].pop("seconds") > 0 and b["run"].pop("seconds") > 0
    assert (
        a["run"] == b["run"]
        and a["run"]["step"] == 150
        and a["identity"] == b["identity"]
    )
    assert a["objective"].keys() == b["objective"].keys()
    assert all(
        torch.equal(a["objective"][name], b["objective"][name])
        for name in a["objective"]
    )
    for index, state in a["optimizer"]["state"].items():
        assert all(
            torch.equal(value, b["optimizer"]["state"][index][name])
            for name, value in state.items()
        )
    assert list(tmp_path.glob(".*.part")) == [], (
        "leftovers of killed writers are removed"
    )


class Stop(Exception):
    """Ends a run from inside."""


def stopping(after: int):
    count = 0

    def draw_until(n: int, n_neg: int, generator: torch.Generator):
        nonlocal count
        count += 1
        if count > after:
            raise Stop
        return draw(n, n_neg, generator)

    return draw_until


@pytest.mark.parametrize("stop", [0, 1, 6, 13, 29])
def test_resume_between_checkpoints(tmp_path: Path, stop: int) -> None:
    file = tmp_path / "deep" / "run.pt"
    unbroken = Encoder()
    whole = fit(unbroken, ExactInfoNCE(5.0), draw, TINY)
    with pytest.raises(Stop):
        fit(
            Encoder(),
            ExactInfoNCE(5.0),
            stopping(stop),
            TINY,
            checkpoint=file,
            checkpoint_every=4,
        )
    assert file.exists() == (stop > 0)  # without a step there is nothing to keep
    if stop:
        assert read_checkpoint(file)["run"]["step"] == stop // 4 * 4
    encoder = Encoder()
    run = fit(
        encoder, ExactInfoNCE(5.0), draw, TINY, checkpoint=file, checkpoint_every=4
    )
    assert torch.equal(weights(encoder), weights(unbroken)) and run.curve == whole.curve
    assert run.curve["step"] == [7, 14, 21, 28, 30]


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first, second = Encoder(), Encoder()
    run = fit(first, InfoNCE(5.0), draw, TINY, checkpoint=tmp_path / "run.pt")
    again = fit(second, InfoNCE(5.0), stopping(0), TINY, checkpoint=tmp_path / "run.pt")
    assert torch.equal(weights(first), weights(second)) and again == run


def test_an_evaluation_cannot_disturb_the_run() -> None:
    def noisy(encoder: nn.Module) -> dict[str, float]:
        return {"noise": float(torch.randn(1000).sum())}

    quiet, disturbed = Encoder(), Encoder()
    loss = MCInfoNCE(5.0, 4)
    torch.manual_seed(1)
    a = fit(quiet, loss, draw, TINY)
    torch.manual_seed(2)
    b = fit(disturbed, loss, draw, TINY, evaluate=noisy)
    assert (
        torch.equal(weights(quiet), weights(disturbed))
        and a.curve["loss"] == b.curve["loss"]
    )
    expected = torch.randn(3, generator=torch.Generator().manual_seed(2))
    assert torch.equal(torch.randn(3), expected), (
        "the caller's generator is left as it was"
    )


# --- checkpoints that cannot be used
# ---------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with pytest.raises(Stop):
        fit(
            Encoder(),
            ExactInfoNCE(5.0),
            stopping(9),
            TINY,
            checkpoint=tmp_path / "run.pt",
            checkpoint_every=4,
        )
    return tmp_path / "run.pt"


def resume(
    path: Path,
    config: Config = TINY,
    loss: nn.Module | None = None,
    encoder: nn.Module | None = None,
) -> Run:
    return fit(
        encoder or Encoder(), loss or ExactInfoNCE(5.0), draw, config, checkpoint=path
    )


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "flip"])
def test_damage_is_named_and_the_file_left_alone(checkpoint: Path, damage: str) -> None:
    good = checkpoint.read_bytes()
    middle = len(good) // 2
    flipped = good[:middle] + bytes([good[middle] ^ 4]) + good[middle + 1 :]
    bad = {
        "cut": good[:middle],
        "empty": b"",
        "text": b"not a checkpoint",
        "flip": flipped,
    }[damage]
    checkpoint.write_bytes(bad)
    with pytest.raises(CheckpointError, match=r"run\.pt is damaged.*delete it"):
        resume(checkpoint)
    assert checkpoint.read_bytes() == bad


def test_no_flipped_bit_goes_through_unnoticed(checkpoint: Path) -> None:
    """Either the flip is refused, or it hit padding and what is read is what was
    written."""
    good, whole = checkpoint.read_bytes(), str(read_checkpoint(checkpoint))
    refused = 0
    for place in range(0, len(good), max(1, len(good) // 150)):
        checkpoint.write_bytes(
            good[:place] + bytes([good[place] ^ 16]) + good[place + 1 :]
        )
        try:
            assert str(read_checkpoint(checkpoint)) == whole
        except CheckpointError:
            refused += 1
    assert refused > 75


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({"format": Trap()}, tmp_path / "run.pt")
    with pytest.raises(CheckpointError):
        resume(tmp_path / "run.pt")
    assert not (tmp_path / "sprung").exists()


def test_checkpoints_of_other_runs_are_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"lr_mu is 0\.004 there and 0\.001 here"):
        resume(
            checkpoint,
            Config(steps=30, batch_size=16, log_every=7, kappa_from=0.2, lr_mu=1e-3),
        )
    with pytest.raises(
        CheckpointError, match="loss is 'ExactInfoNCE' there and 'ExactNWJ' here"
    ):
        resume(checkpoint, loss=ExactNWJ(5.0))
    with pytest.raises(CheckpointError, match="another encoder"):
        resume(checkpoint, encoder=Encoder(shared=True))
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match="not a checkpoint of format"):
        resume(tmp_path / "foreign.pt")


def test_a_folder_that_cannot_be_written_to_fails_before_the_first_step(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"needs a folder.*choose another file"):
        fit(
            Encoder(),
            InfoNCE(5.0),
            stopping(0),
            TINY,
            checkpoint=tmp_path / "file" / "run.pt",
        )


def test_a_failed_write_keeps_the_old_checkpoint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = checkpoint.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"No space.*the one before it is still there"
    ):
        fit(
            Encoder(),
            ExactInfoNCE(5.0),
            draw,
            TINY,
            checkpoint=checkpoint,
            checkpoint_every=4,
        )
    assert (
        checkpoint.read_bytes() == old and list(checkpoint.parent.glob(".*.part")) == []
    )


# --- runs that go wrong
# ----------------------------------------------------------------------------------------------


class Explodes(nn.Module):
    """Finite for a while, then `value`; or finite with a gradient that is not."""

    def __init__(self, after: int, value: float):
        super().__init__()
        self.calls, self.after, self.value = 0, after, value

    def forward(
        self,
        q: VonMisesFisher,
        q_pos: VonMisesFisher,
        q_neg: VonMisesFisher | None = None,
    ) -> Tensor:
        self.calls += 1
        good = (q.loc * q_pos.loc).sum(-1).mean() + 0 * q.concentration.mean()
        if self.calls <= self.after:
            return good
        return (
            good * self.value if self.value else (good - good.detach()).sqrt()
        )  # slope of a root at 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_divergence_names_step_config_and_checkpoint(
    tmp_path: Path, value: float
) -> None:
    file = tmp_path / "run.pt"
    encoder = Encoder()
    with pytest.raises(Diverged) as caught:
        fit(
            encoder,
            Explodes(10, value),
            draw,
            TINY,
            checkpoint=file,
            checkpoint_every=4,
        )
    assert (
        caught.value.step == 10
        and caught.value.checkpoint == file
        and caught.value.config == TINY
    )
    for said in ("step 10", str(file), "lr_mu=0.004", "norm" if value == 0 else "loss"):
        assert said in str(caught.value)
    assert (
        read_checkpoint(file)["run"]["step"] == 8 and weights(encoder).isfinite().all()
    )
    for place in (None, tmp_path / "other.pt"):
        with pytest.raises(Diverged, match="there is no checkpoint"):
            fit(Encoder(), Explodes(0, value), draw, TINY, checkpoint=place)
    assert not (tmp_path / "other.pt").exists()


def test_a_run_killed_before_its_first_checkpoint_does_not_stop_another(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.pt"
    with pytest.raises(Stop):
        fit(Encoder(), ExactInfoNCE(5.0), stopping(2), TINY, checkpoint=file)
    assert read_checkpoint(file)["run"]["step"] == 0
    other = replace(TINY, lr_mu=1e-3)
    run = fit(Encoder(), ExactInfoNCE(5.0), draw, other, checkpoint=file)
    assert run.step == other.steps


def test_one_row_without_negatives_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    alone, file = replace(TINY, batch_size=1), tmp_path / "run.pt"
    with pytest.raises(ValueError, match="batch_size must be 2 or more"):
        fit(Encoder(), ExactInfoNCE(5.0), stopping(0), alone, checkpoint=file)
    assert not file.exists()


def test_wrong_requests_say_what_to_do() -> None:
    if torch.cuda.device_count() == 0:
        with pytest.raises(ValueError, match=r"1 CUDA device.*0 found.*device='cpu'"):
            connect("cuda")
    with pytest.raises(ValueError, match="auto, cpu or cuda"):
        connect("tpu")
    with pytest.raises(ValueError, match="at least 1"):
        connect(devices=0)
    with pytest.raises(ValueError, match="bf16-mixed"):
        connect(precision="half")
    with pytest.raises(ValueError, match="reduction='mean', not 'none'"):
        Contrast(Encoder(), InfoNCE(5.0, reduction="none"))
    frozen = Encoder().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        fit(frozen, InfoNCE(5.0), draw, TINY)
    with pytest.raises(
        ValueError, match="nothing learns at step 15"
    ):  # InfoNCE does not look at kappa
        fit(
            Encoder(),
            InfoNCE(5.0),
            draw,
            Config(steps=30, batch_size=16, kappa_from=0.5, mu_until=0.5),
        )


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"batch_size": 0}, {"n_neg": -1}, {"lr_kappa": -1.0}, {"schedule": "cosine"}, {"decay": 0.0},
     {"warmup": 1.0}, {"kappa_from": 1.1}, {"mu_until": 0.1}, {"clip": 0.0}, {"log_every": 0}, {"clip": math.nan}],
)  # fmt: skip
def test_config_refuses(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(**wrong)  # type: ignore[arg-type]


def test_without_lightning_one_process_trains_and_more_say_what_to_install(
    tmp_path: Path,
) -> None:
    code = """
import sys
sys.modules["lightning_fabric"] = sys.modules["tqdm"] = None
from pcl.losses import InfoNCE
from pcl.devices import connect
from pcl.training import Config, train_encoder as fit
from training_world import Encoder, draw

run = fit(Encoder(), InfoNCE(5.0), draw, Config(steps=3, batch_size=8))
try:
    connect("cpu", devices=2)
except ImportError as error:
    print(run.step, error)
"""
    said = python(tmp_path, code)
    assert said.startswith("3 ") and "pip install '" in said
    assert "'lightning-fabric>=" in said or "'.[train]'" in said


# --- objectives
# ------------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """Remembers another encoder, and passes on what it is given."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.inside = nn.ModuleList([encoder])

    def forward(self, x: Tensor) -> VonMisesFisher:
        return self.inside[0](x)


class Proxies(nn.Module):
    """One point per class."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.eye(3, 4))

    def forward(self, q: VonMisesFisher, labels: Tensor) -> Tensor:
        cosines = q.loc @ self.points.T
        return nn.functional.cross_entropy(q.concentration[:, None] * cosines, labels)


def labelled() -> Epochs:
    return Epochs(
        draw(50, 0, torch.Generator().manual_seed(1))[0], torch.arange(50) % 3
    )


def sizes(groups: dict[str, list[nn.Parameter]]) -> dict[str, int]:
    return {name: len(parameters) for name, parameters in groups.items()}


def test_a_wrapper_does_not_hide_the_groups() -> None:
    encoder = SphereEncoder(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)),
    )
    bare, wrapped = (
        parameter_groups(Contrast(e, InfoNCE(5.0)))
        for e in (encoder, Wrapper(Wrapper(encoder)))
    )
    assert sizes(bare) == {"mu": 4, "kappa": 4}
    assert {n: [id(p) for p in ps] for n, ps in bare.items()} == {
        n: [id(p) for p in ps] for n, ps in wrapped.items()
    }
    assert sizes(encoder_groups(nn.Conv2d(3, 4, 1))) == {"mu": 2, "kappa": 0}, (
        "a convolution's `groups` is a number"
    )


def test_phases_work_behind_a_wrapper() -> None:
    phases = Config(steps=6, batch_size=16, kappa_from=0.5, mu_until=0.5, lr_kappa=1e-2)
    plain, inside = Encoder(), Encoder()
    a = fit(plain, ExactInfoNCE(5.0), draw, phases)
    b = fit(Wrapper(inside), ExactInfoNCE(5.0), draw, phases)
    assert torch.equal(weights(plain), weights(inside)) and a.curve == b.curve


def test_modes_follow_the_groups_behind_a_wrapper() -> None:
    encoder = Statistics()
    wrapped = Wrapper(encoder)
    of_kappa = parts_of(wrapped, encoder_groups(wrapped)["kappa"])
    assert of_kappa == [encoder.kappa_net]
    for now in (Learns(True, False), Learns(False, True)):
        set_modes(wrapped, of_kappa, now)
        modes = encoder.mu_net[1].training, encoder.kappa_net[1].training
        assert modes == tuple(now)


@pytest.mark.parametrize("named", [(), ("mu", "kappa")])
def test_each_parameter_is_in_one_group(named: tuple[str, ...]) -> None:
    class Careless(Contrast):
        def groups(self) -> dict[str, list[nn.Parameter]]:
            first, *rest = self.encoder.parameters()
            groups: dict[str, list[nn.Parameter]] = {"mu": rest, "kappa": []}
            for name in named:
                groups[name].append(first)
            return groups

    wanted = "no group" if not named else "mu and kappa"
    with pytest.raises(ValueError, match=rf"encoder\.mu_net\.0\.weight is in {wanted}"):
        train(Careless(Encoder(), InfoNCE(5.0)), draw, TINY)


def test_a_group_may_have_a_rate_of_its_own() -> None:
    objective = ByLabel(Encoder(), Proxies(), rates={"loss": 10.0})
    optimizer = make_optimizer(objective, TINY)
    set_rates(optimizer, TINY, 15)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    factor = rate_factor(TINY, 15)
    assert rates == {
        "mu": factor * 4e-3,
        "kappa": factor * 2e-3,
        "loss": factor * 4e-3 * 10,
    }
    with pytest.raises(
        ValueError, match=r"rates are given for proxies.*mu, kappa, loss"
    ):
        make_optimizer(ByLabel(Encoder(), Proxies(), rates={"proxies": 2.0}), TINY)


def test_a_loss_of_labels_learns_with_its_proxies() -> None:
    objective = ByLabel(Encoder(), Proxies(), rates={"loss": 2.0})
    config = Config(steps=60, batch_size=16, lr_mu=2e-2, lr_kappa=1e-2, log_every=20)
    before = objective.loss.points.detach().clone()
    losses = train(objective, labelled(), config).curve["loss"]
    assert losses[-1] < losses[0] - 0.1
    assert not torch.equal(objective.loss.points, before)


def test_soft_labels_are_labels() -> None:
    x, labels = torch.randn(8, 6), torch.arange(8) % 3
    objective = Classify(nn.Linear(6, 3))
    soft = nn.functional.one_hot(labels, 3).float()
    torch.testing.assert_close(objective((x, labels)), objective((x, soft)))


LABELLED = {
    "classes": lambda: Classify(nn.Linear(6, 3)),
    "labels": lambda: ByLabel(Encoder(), Proxies()),
}


@pytest.mark.parametrize("name", LABELLED)
@pytest.mark.parametrize("stop", [1, 9, 20])
def test_labelled_runs_resume_bit_by_bit(tmp_path: Path, name: str, stop: int) -> None:
    """Epochs of three batches and two items left over, so stops fall within them."""

    class Stopping(Epochs):
        def at(self, step: int):
            if step == stop:
                raise Stop
            return super().at(step)

    def start() -> Objective:
        torch.manual_seed(0)
        return LABELLED[name]()

    file, data = tmp_path / "run.pt", labelled()
    unbroken, resumed = start(), start()
    whole = train(unbroken, data, TINY)
    stopping = Stopping(data.x, data.labels)
    with pytest.raises(Stop):
        train(start(), stopping, TINY, checkpoint=file, checkpoint_every=4)
    run = train(resumed, labelled(), TINY, checkpoint=file)
    assert torch.equal(weights(unbroken), weights(resumed)) and run.curve == whole.curve


def test_a_draw_of_labels_must_keep_to_its_order() -> None:
    x, labels = torch.randn(16, 6), torch.arange(16) % 3
    broken = x.clone()
    broken[3, 2] = math.nan
    for given, message in (
        ((x, labels[:4]), "asked for 16 inputs and labels"),
        ((x, labels, None), "asked for 16 inputs and labels"),
        ((broken, labels), "inputs with NaN or infinity at step 0"),
    ):
        with pytest.raises(ValueError, match=message):
            train(LABELLED["classes"](), lambda *_, given=given: given, TINY)


def test_an_epoch_takes_every_item_once() -> None:
    data = Epochs(torch.arange(50), torch.arange(50))
    drawn = [data.at(step)(16, 0, torch.Generator())[1] for step in range(6)]
    first, second = torch.cat(drawn[:3]), torch.cat(drawn[3:])
    assert len(first.unique()) == len(second.unique()) == 48
    assert not torch.equal(first, second)


def test_a_checkpoint_of_contrast_has_the_format_it_always_had(
    checkpoint: Path,
) -> None:
    content = read_checkpoint(checkpoint)
    assert content["format"] == "pcl.training 1"
    assert content["identity"] == {**asdict(TINY), "loss": "ExactInfoNCE"}
    assert list(content["objective"]) == [
        f"encoder.{name}" for name in Encoder().state_dict()
    ]
    assert [group["name"] for group in content["optimizer"]["param_groups"]] == [
        "mu",
        "kappa",
    ]
    assert "rate" not in content["optimizer"]["param_groups"][0]


def test_an_objective_may_bring_its_optimiser() -> None:
    class Plain(Classify):
        def optimizer(self, groups, lr, weight_decay):
            return torch.optim.SGD(groups, lr)

    torch.manual_seed(0)
    net, byhand = nn.Linear(6, 3), nn.Linear(6, 3)
    byhand.load_state_dict(net.state_dict())
    data = labelled()
    config = Config(steps=2, batch_size=16, schedule="constant", clip=math.inf)
    train(Plain(net), data, config)
    for step in range(2):
        x, labels = data.at(step)(16, 0, torch.Generator())
        byhand.zero_grad()
        nn.functional.cross_entropy(byhand(x), labels).backward()
        with torch.no_grad():
            for p in byhand.parameters():
                p -= 4e-3 * p.grad
    torch.testing.assert_close(weights(net), weights(byhand))


# --- several processes
# -----------------------------------------------------------------------------------------------

CASES = {
    "exact": {"loss": "ExactInfoNCE"},
    "nwj": {"loss": "ExactNWJ"},
    "points": {"loss": "InfoNCE"},  # which gives the concentrations no gradient
    "shared": {"loss": "ExactInfoNCE", "shared": True},
    "learned": {"loss": "ExactInfoNCE", "learn_kappa_pos": True},
    "fresh": {"loss": "ExactInfoNCE", "n_neg": 3},
    "frozen": {"loss": "ExactInfoNCE", "kappa_from": 1.0},
    "phase": {
        "loss": "ExactInfoNCE",
        "shared": True,
        "kappa_from": 0.0,
        "mu_until": 0.0,
    },
}
COMPARE = """
import json, sys
import torch
import pcl.losses
from pcl.devices import connect
from pcl.training import Config, train_encoder as fit
from training_world import Encoder, draw

devices, cases, out = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
place = connect("cpu", devices=devices)
found = {}
for name, case in cases.items():
    for steps in (1, 4):
        config = Config(steps=steps, batch_size=12, n_neg=case.get("n_neg", 0), kappa_from=case.get("kappa_from", 0.0),
                        mu_until=case.get("mu_until", 1.0), clip=float("inf"), log_every=1)
        loss = getattr(pcl.losses, case["loss"])(5.0, learn_kappa_pos=case.get("learn_kappa_pos", False))
        encoder = Encoder(case.get("shared", False))
        file = f"{out}.{name}.{steps}.pt"
        run = fit(encoder, loss, draw, config, place=place, checkpoint=file, checkpoint_every=1)
        named = [*encoder.named_parameters(), *loss.named_parameters()]
        grads = {k: p.grad for k, p in named if p.grad is not None}
        found[f"{name}/{steps}"] = {"loss": torch.tensor(run.curve["loss"]), **grads}
if place.global_rank == 0:
    torch.save(found, out)
"""


def test_two_processes_give_the_loss_and_gradients_of_one(tmp_path: Path) -> None:
    pytest.importorskip(
        "lightning_fabric", reason="several processes need the train extra"
    )
    found = {}
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        folder.mkdir()
        python(folder, COMPARE, str(devices), json.dumps(CASES), str(folder / "found"))
        found[devices] = torch.load(folder / "found", weights_only=True)
    one, two = found[1], found[2]
    assert one.keys() == two.keys() and len(one) == 2 * len(CASES)
    for name, tensors in one.items():
        assert tensors.keys() == two[name].keys(), (
            f"{name}: gradients for other parameters"
        )
        for key, expected in tensors.items():
            gap = (two[name][key] - expected).abs().max().item()
            assert gap <= 1e-5, f"{name}: {key} is off by {gap}"
    assert (
        len(one["points/1"]) < len(one["exact/1"])
        and "log_kappa_pos" in one["learned/1"]
    )
    assert {key.split(".")[0] for key in one["phase/1"]} == {"loss", "kappa_net"}


def test_a_run_moves_from_two_processes_to_one(tmp_path: Path) -> None:
    """A checkpoint says nothing about processes, so a run may change their number
    half-way."""
    pytest.importorskip(
        "lightning_fabric", reason="several processes need the train extra"
    )
    code = """
import sys
from pcl.losses import ExactInfoNCE
from pcl.devices import connect
from pcl.training import Config, train_encoder as fit
from training_world import Encoder, draw

def stop_at_half(n, n_neg, generator, drawn=[]):
    drawn.append(n)
    if len(drawn) > 10:
        sys.exit(0)
    return draw(n, n_neg, generator)

config = Config(steps=20, batch_size=12, log_every=1)
two = connect("cpu", devices=2)
fit(Encoder(), ExactInfoNCE(5.0), stop_at_half, config, place=two, checkpoint=sys.argv[1], checkpoint_every=5)
"""
    python(tmp_path, code, str(tmp_path / "run.pt"))
    assert read_checkpoint(tmp_path / "run.pt")["run"]["step"] == 10
    config = Config(steps=20, batch_size=12, log_every=1)
    moved = fit(
        Encoder(), ExactInfoNCE(5.0), draw, config, checkpoint=tmp_path / "run.pt"
    )
    stayed = fit(Encoder(), ExactInfoNCE(5.0), draw, config)
    there, here = torch.tensor(moved.curve["loss"]), torch.tensor(stayed.curve["loss"])
    torch.testing.assert_close(there, here, rtol=0, atol=1e-4)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_other_precisions(precision: str) -> None:
    pytest.importorskip(
        "lightning_fabric", reason="other precisions need the train extra"
    )
    encoder = Encoder()
    run = fit(
        encoder,
        ExactInfoNCE(5.0),
        draw,
        TINY,
        place=connect("cpu", precision=precision),
    )
    reference = fit(Encoder(), ExactInfoNCE(5.0), draw, TINY)
    assert next(encoder.parameters()).dtype == (
        torch.float64 if precision == "64-true" else torch.float32
    )
    tolerance = 1e-4 if precision == "64-true" else 0.1
    torch.testing.assert_close(
        torch.tensor(run.curve["loss"]),
        torch.tensor(reference.curve["loss"]),
        rtol=0,
        atol=tolerance,
    )


def test_the_batch_must_split_evenly() -> None:
    class Three:
        world_size, global_rank, device = 3, 0, torch.device("cpu")

    with pytest.raises(ValueError, match="batch_size 16 cannot be split evenly over 3"):
        fit(Encoder(), InfoNCE(5.0), draw, TINY, place=Three())


def test_draw_must_keep_to_its_order() -> None:
    def short(n: int, n_neg: int, generator: torch.Generator):
        return draw(n - 1, n_neg, generator)

    def without_negatives(n: int, n_neg: int, generator: torch.Generator):
        return draw(n, 0, generator)

    with pytest.raises(ValueError, match="asked for 16 pairs and 0 negatives each"):
        fit(Encoder(), InfoNCE(5.0), short, TINY)
    with pytest.raises(ValueError, match="asked for 16 pairs and 2 negatives each"):
        fit(
            Encoder(),
            InfoNCE(5.0),
            without_negatives,
            Config(steps=2, batch_size=16, n_neg=2),
        )


def test_negatives_while_kappa_is_held_back() -> None:
    asked = []

    def noting(n: int, n_neg: int, generator: torch.Generator):
        asked.append(n_neg)
        return draw(n, n_neg, generator)

    phases = Config(
        steps=4, batch_size=8, n_neg=3, n_neg_frozen=0, kappa_from=0.5, mu_until=0.5
    )
    fit(Encoder(), ExactInfoNCE(5.0), noting, phases)
    assert asked == [0, 0, 3, 3]


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_terminal_shows_a_bar_with_live_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tqdm", reason="the bar needs the train extra")
    code = """
import fcntl, os, pty, struct, sys, termios, threading
leader, follower = pty.openpty()
fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
os.dup2(follower, 2)
os.close(follower)
said = []

def listen():  # until the other end closes: one read returns only what has arrived by then
    try:
        while piece := os.read(leader, 4096):
            said.append(piece)
    except OSError:  # Linux reports a closed pseudo-terminal as an error, others as an empty read
        pass

listener = threading.Thread(target=listen)
listener.start()
from pcl.losses import InfoNCE
from pcl.training import Config, train_encoder as fit
from training_world import Encoder, draw

config = Config(steps=6, batch_size=8, log_every=2, label="tiny")
fit(Encoder(), InfoNCE(5.0), draw, config, evaluate=lambda encoder: {"rank": 0.25})
sys.stderr.flush()
os.dup2(1, 2)
listener.join()
print(b"".join(said).decode())
"""
    said = python(tmp_path, code)
    assert "tiny" in said and "6/6" in said and "loss=" in said and "rank=0.250" in said


class Statistics(Encoder):
    """An encoder with running statistics in both parts, and with dropout that looks at
    its own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.mu_net.insert(1, nn.BatchNorm1d(12))
        self.kappa_net.insert(1, nn.BatchNorm1d(12))

    def forward(self, x: Tensor) -> VonMisesFisher:
        return super().forward(nn.functional.dropout(x, 0.2, self.training))


def test_a_frozen_part_keeps_its_running_statistics_and_modes_survive_a_resume(
    tmp_path: Path,
) -> None:
    phases = Config(steps=8, batch_size=16, kappa_from=0.5, mu_until=0.5, log_every=1)
    seen: list[dict[str, Tensor]] = []

    def remember(encoder: nn.Module) -> dict[str, float]:
        seen.append(
            {name: value.clone() for name, value in encoder.state_dict().items()}
        )
        return {}

    whole = Statistics()
    fit(whole, ExactInfoNCE(5.0), draw, phases, evaluate=remember)
    for name in seen[0]:
        still = [torch.equal(a[name], b[name]) for a, b in pairwise(seen)]
        first, second = still[:3], still[3:]
        frozen, learning = (
            (second, first) if name.startswith("mu_net") else (first, second)
        )
        assert all(frozen) and not any(learning), name
    assert not whole.training
    with pytest.raises(Stop):
        fit(
            Statistics(),
            ExactInfoNCE(5.0),
            stopping(3),
            phases,
            checkpoint=tmp_path / "run.pt",
            checkpoint_every=1,
        )
    resumed = Statistics()
    fit(resumed, ExactInfoNCE(5.0), draw, phases, checkpoint=tmp_path / "run.pt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
