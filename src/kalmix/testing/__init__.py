"""The conformance suite, shipped: cases, budgets, laws and the self-check. Bring your own kernel."""
