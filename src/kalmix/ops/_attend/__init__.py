"""The op `attend`: attention to a history, each token weighed by what its lag makes of it."""
