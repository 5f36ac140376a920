"""The checks, one module a kind. Importing this package declares them all."""

from __future__ import annotations

from hf_moe_conformance.checks import attention as attention
from hf_moe_conformance.checks import dispatcher as dispatcher
from hf_moe_conformance.checks import experts as experts
from hf_moe_conformance.checks import linear as linear
from hf_moe_conformance.checks import loss as loss
from hf_moe_conformance.checks import model as model
from hf_moe_conformance.checks import norm as norm
