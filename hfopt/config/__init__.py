"""Config in, config out: read any TrainingArguments YAML, say what is wrong with it, change only the values that change."""
