"""Commands as children of ours: one in the foreground that gets our signals, and ones that must leave nothing behind."""
