"""Verdicts: which draft tokens are kept, and which token comes next."""

from outrider.verify.base import GreedyTokens
from outrider.verify.select import verify

__all__ = ["GreedyTokens", "verify"]
