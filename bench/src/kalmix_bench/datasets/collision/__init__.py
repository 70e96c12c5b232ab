"""Controlled collision (section 4.1 and appendix E of Memory by Design): what one address costs another.

`mechanism` and `predictions`: nothing learned, a fixed schedule of writes beside the paper's closed forms.
`sequences` and `models`: the same geometry inside sequences on which five models are trained.
"""
