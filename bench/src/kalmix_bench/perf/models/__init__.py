"""Speed and memory of training steps of whole models, next to the models of other libraries."""
