"""Watches a run while it trains: what it reads, how it judges, what it writes."""
