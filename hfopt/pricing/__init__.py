"""What every candidate costs: its memory and its time, from traces made at most once."""
