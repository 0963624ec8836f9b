"""The job: what was asked and what is planned, read from a file or a live Trainer."""
