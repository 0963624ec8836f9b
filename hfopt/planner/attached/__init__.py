"""Planning inside the user's own process: what `hfopt run` does with a Trainer just before it trains."""
