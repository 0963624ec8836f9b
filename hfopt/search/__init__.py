"""The candidates: every setting that keeps the effective batch, which of them fit, and which is fastest."""
