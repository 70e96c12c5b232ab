"""The op `ridge`: a ridge regression over the past, solved anew at every token."""
