"""While training runs: watch it, name what holds it back, and survive running out of memory."""
