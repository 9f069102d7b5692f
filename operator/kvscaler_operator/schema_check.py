"""Whether the installed CRD can store what this version reads.

An API server silently drops fields that its CRD does not know. A limit that a user wrote would then
not exist, and the service would run without it. So an outdated CRD is said on every service, and
nothing is acted on until it is upgraded.
"""

import logging
from functools import partial

from kvscaler_api.crd import missing_fields
from kvscaler_api.reasons import Reason
from kvscaler_api.service import GROUP, PLURAL

from kvscaler_operator.assess import Finding
from kvscaler_operator.gateways.kube import ForbiddenError, KubeGateway
from kvscaler_operator.patience import patiently
from kvscaler_operator.resources import CUSTOM_RESOURCES

logger = logging.getLogger(__name__)

LISTED = 8


async def schema_fault(kube: KubeGateway) -> Finding | None:
    """What the installed CRD lacks; `None` when it lacks nothing.

    Where the operator may not read CRDs (a namespaced installation), nothing can be compared: that
    is logged, and taken as no fault.
    """
    name = f"{PLURAL}.{GROUP}"
    try:
        installed = await patiently(
            "Reading the installed CRD", partial(kube.get, CUSTOM_RESOURCES, None, name)
        )
    except ForbiddenError as error:
        logger.info("The installed CRD is not compared with the packaged one: %s", error)
        return None
    missing = missing_fields(installed)
    if not missing:
        return None
    return Finding(
        Reason.CRD_OUTDATED,
        f"the installed CRD {name} lacks {', '.join(missing[:LISTED])}"
        f"{' and more' if len(missing) > LISTED else ''}, so the API server drops what is written "
        "there: apply the CRD of this version (helm upgrade does)",
    )
