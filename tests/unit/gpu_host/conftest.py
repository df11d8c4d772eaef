from __future__ import annotations

from tests.fixtures_s3 import seaweed

__all__ = ["seaweed"]
