"""Interference between overlapping keys (section 4.1 and appendix E of Memory by Design)."""

from kalmix_bench.experiments.collision.protocol import PRESETS, STUDIES, CollisionCell, CollisionProtocol

__all__ = ["PRESETS", "STUDIES", "CollisionCell", "CollisionProtocol"]
