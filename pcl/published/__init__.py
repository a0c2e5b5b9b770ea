"""What the published code does, kept wrong on purpose: one module per layer, for studies alone."""
