"""Facts of other packages that several stages rely on: what they are, without doing anything."""
