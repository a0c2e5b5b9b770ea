"""The re-analysis of the URL benchmark: reading, selecting, measuring, and its record."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from pcl.claims import judged_claims
from pcl.datasets import DataError
from pcl.experiments import Job, experiments
from pcl.ledger import Runs, latest, read
from pcl.studies.url_choices import (
    measure_rates,
    measure_replay,
    measure_rule,
    pooled,
    replicas,
)
from pcl.studies.url_results import (
    MODELS,
    ReleaseSettings,
    as_runs,
    bar,
    by_model,
    by_protocol,
    chosen_epochs,
    correlation,
    generated_release,
    kept,
    measure_release,
    measure_stops,
    read_release,
    release_folder,
)

ROWS = experiments()["url_results"].rows
RELEASE = generated_release(0)


def recorded() -> Runs:
    return Runs(latest(read())).where(experiment="url_results", preset="cpu")


# ------------------------------------------------------------------------------------
# reading

EXPORT = """Name,Sweep,State,model,loss,num-heads,unc-module,lr,Runtime,\
best_test_avg_downstream_auroc_correct,best_eval_avg_downstream_r1
a-1,s,finished,resnet50,cross-entropy,,class-entropy,0.1,60,0.5,0.3
a-2,s,failed,resnet50,cross-entropy,10,jsd,0.1,60,,0.05
a-3,s,crashed,vit_medium_patch16_gap_256hetxl,cross-entropy,,hetxl-det,0.1,60,nan,
a-4,s,finished,vit_medium_patch16_gap_256,riskpred,,pred-net,0.1,60,0.61,0.4
"""


def test_a_run_is_known_by_its_network_loss_and_heads() -> None:
    runs = as_runs(EXPORT)
    wanted = ["ce-resnet50", "ensemble-resnet50", "het-xl-vit", "losspred-vit"]
    assert list(runs["model"]) == wanted and set(wanted) <= MODELS.keys()
    assert runs["r_auroc"][0] == 0.5 and np.isnan(runs["r_auroc"][1:3]).all()
    assert list(kept(runs)) == [True, False, False, True]
    assert np.isnan(runs["ood"]).all()  # a column that this export does not have


def test_a_new_loss_is_refused() -> None:
    with pytest.raises(KeyError, match="unheard"):
        as_runs(EXPORT.replace("riskpred", "unheard"))


def test_missing_files_are_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"url-results is not in .* PCL_DATA"):
        release_folder()
    (tmp_path / "url-results").mkdir()
    (tmp_path / "url-results" / "wandb_export.csv").write_text(EXPORT)
    with pytest.raises(DataError, match="holds 1 files, not 25"):
        release_folder()


# ------------------------------------------------------------------------------------
# selecting and measuring, on noise


def test_a_bar_has_the_named_runs_that_were_kept() -> None:
    runs = {k: v.copy() for k, v in RELEASE.runs.items()}
    release = RELEASE._replace(runs=runs)
    rows = bar(release, "elk-vit")
    assert list(runs["name"][rows]) == RELEASE.bars["r_auroc"]["elk-vit"]
    assert set(runs["model"][rows]) == {"elk-vit"}
    runs["recall_val"][rows[1]] = 0.1  # not above
    assert list(bar(release, "elk-vit")) == [rows[0], rows[2]]


def test_the_rule_takes_the_best_on_validation_and_its_replicas() -> None:
    runs = {k: v.copy() for k, v in RELEASE.runs.items()}
    release = RELEASE._replace(runs=runs)
    rows = np.flatnonzero(runs["model"] == "ce-vit")
    runs["r_auroc_val"][rows[4]] = 0.99
    runs["lr"][rows[6]] = runs["lr"][rows[4]]
    assert list(by_protocol(release, "ce-vit")) == [rows[4], rows[6]]
    runs["recall_val"][rows[4]] = 0.0
    assert rows[4] not in by_protocol(release, "ce-vit")


def test_correlations_leave_out_what_is_missing() -> None:
    runs = {k: v.copy() for k, v in RELEASE.runs.items()}
    runs["human"][::3] = np.nan
    everything = np.ones(len(runs["human"]), dtype=bool)
    there = np.isfinite(runs["human"])
    expected = spearmanr(runs["r_auroc"][there], runs["human"][there]).statistic
    found = correlation(runs, "r_auroc", "human", everything)
    assert math.isclose(found, expected, rel_tol=1e-12)
    inner = by_model(runs, "r_auroc", "human", everything)
    mine = there & (runs["model"] == "hib-vit")
    expected = spearmanr(runs["r_auroc"][mine], runs["human"][mine]).statistic
    assert math.isclose(inner["hib-vit"], expected, rel_tol=1e-12)


def test_an_epoch_counts_if_the_checkpoint_is_the_published_one() -> None:
    again = {k: v.copy() for k, v in RELEASE.again.items()}
    release = RELEASE._replace(again=again)
    theirs = RELEASE.runs["r_auroc"][bar(RELEASE, "sngp-vit")]
    rows = np.flatnonzero(again["model"] == "sngp-vit")
    again["r_auroc"][rows] = [theirs[0], theirs[2] + 1e-4, theirs.max() + 0.1]
    again["checkpoint"][rows] = [f"x/checkpoint-{e}.pth.tar" for e in (7, 0, 3)]
    assert chosen_epochs(release)["sngp-vit"] == [0, 7]


def test_exactly_one_half_is_counted_and_nearly_is_not() -> None:
    runs = {k: v.copy() for k, v in RELEASE.runs.items()}
    runs["r_auroc_end"][:5], runs["r_auroc_end"][5] = 0.5, 0.50001
    runs["crop_end"][:5] = [0.0, 0.05, 0.06, 0.5, 0.9]
    runs["r_auroc_human"][:2], runs["human"][0] = 0.5, np.nan
    metrics, series = measure_stops(RELEASE._replace(runs=runs))
    assert (metrics["blind"], metrics["blind_crops"]) == (5, 3)
    assert (metrics["blind_varied"], metrics["blind_constant"]) == (1, 1)
    assert sum(series["blind"]["runs"]) == 5


@pytest.mark.parametrize("row", ["whole", "pretrained", "hib-vit", "ce-resnet50"])
def test_noise_of_the_same_form_is_measured_to_the_same_names(row: str) -> None:
    found = measure_release(ReleaseSettings("generated", row), 1)
    known = recorded().row(row)[0]
    assert found.metrics.keys() == known.metrics.keys()
    assert found.series.keys() == known.series.keys()
    again = measure_release(ReleaseSettings("generated", row), 1)
    assert again.metrics == found.metrics


# ------------------------------------------------------------------------------------
# the record


def test_every_run_behind_a_bar_is_recorded_once() -> None:
    runs = recorded()
    assert set(runs.rows) == set(ROWS) == {"whole", "pretrained", *MODELS}
    seeds = {row: len(runs.row(row)) for row in MODELS}
    assert {n for row, n in seeds.items() if row != "hib-vit"} == {3}
    assert seeds["hib-vit"] == 2 == len(ROWS["hib-vit"].seeds)


def test_the_files_give_the_record_again() -> None:
    try:
        read_release()
    except DataError as error:
        pytest.skip(str(error))
    for row in ("pretrained", "hib-vit", "nivmf-vit"):
        for run in recorded().row(row):
            found = measure_release(Job(*run.key).settings(), run.seed).metrics
            assert found == pytest.approx(dict(run.metrics), rel=1e-9)


def test_the_best_of_each_backbone_is_best_in_part() -> None:
    rows = judged_claims(read(), "url")
    assert [r.claim.name for r in rows] == ["best-resnet", "best-vit"]
    for row in rows:
        assert row.claim.released and row.runs == "their data" and row.seeds >= 2
        assert row.verdict == "holds in part" and not row.weak
    assert {r.verdict for r in judged_claims([], "url")} == {"not testable here"}


# ------------------------------------------------------------------------------------
# the choices, replayed


def test_replicas_are_no_candidates_of_the_rule() -> None:
    runs = {k: v.copy() for k, v in RELEASE.runs.items()}
    release = RELEASE._replace(runs=runs)
    rows = np.flatnonzero(runs["model"] == "ce-vit")
    runs["r_auroc_val"][rows] = np.linspace(0.1, 0.8, len(rows))
    assert list(by_protocol(release, "ce-vit")) == [rows[-1]]
    runs["sweep"][rows[-2:]] = "r"  # better, by the luck of a seed
    assert list(by_protocol(release, "ce-vit")) == [rows[-3]]
    runs["lr"][rows[-1]] = runs["lr"][rows[-3]]  # one of them repeats it
    assert list(by_protocol(release, "ce-vit")) == [rows[-3], rows[-1]]


def test_replicas_and_the_run_they_repeat_are_one_setting() -> None:
    runs = {k: v.copy() for k, v in RELEASE.runs.items()}
    release = RELEASE._replace(runs=runs)
    assert replicas(release) == []  # one sweep, no repetition
    rows = np.flatnonzero(runs["model"] == "elk-vit")
    runs["sweep"][rows[:2]], runs["lr"][rows[:3]] = "r", 0.01
    runs["recall_val"][rows[:3]] = 0.5
    (values,) = replicas(release)
    assert sorted(values) == sorted(runs["r_auroc"][rows[:3]])
    runs["recall_val"][rows[1]] = 0.1  # dropped
    assert len(replicas(release)[0]) == 2
    spread, freedom = pooled([np.array([1.0, 3.0]), np.array([2.0, 2.0, 2.0])])
    assert (freedom, spread) == (3, pytest.approx((2 / 3) ** 0.5))


def test_a_bar_without_the_rules_run_is_told_and_a_rate_is_unscaled() -> None:
    metrics, series = measure_rule(RELEASE)
    rates = measure_rates(RELEASE)
    for number, model in enumerate(MODELS):
        shown, ruled = bar(RELEASE, model), by_protocol(RELEASE, model)
        agrees = bool(set(shown) & set(ruled))
        assert series["rule"]["agrees"][number] == agrees
        batch = {"infonce": 2016, "mcinfonce": 2016}.get(model.rpartition("-")[0], 2048)
        batch = {"hib-resnet50": 2016, "hib-vit": 2064}.get(model, batch)
        lr = RELEASE.runs["lr"][shown[0]] / math.sqrt(batch / 256)
        assert rates[f"rate_{model}"] == pytest.approx(lr)
    apart = np.abs(np.subtract(series["rule"]["ruled"], series["rule"]["printed"]))
    others = apart[~np.array(series["rule"]["agrees"], dtype=bool)]
    assert metrics["apart_most"] == max(others, default=0.0)


def test_the_files_give_the_replay_again() -> None:
    try:
        read_release()
    except DataError as error:
        pytest.skip(str(error))
    (run,) = Runs(latest(read())).where(experiment="url_choices", preset="cpu")
    found = measure_replay(Job(*run.key).settings(), run.seed).metrics
    assert found == pytest.approx(dict(run.metrics), rel=1e-9)
