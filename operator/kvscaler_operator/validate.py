"""Whether a spec can be acted on, before anything is made from it."""

from kvscaler_api.conflicts import argument_conflicts, template_conflicts
from kvscaler_api.implemented import not_implemented
from kvscaler_api.reasons import Reason
from kvscaler_api.service import InferenceService, InvalidServiceError, read_service
from kvscaler_api.size import size_fault

from kvscaler_operator.assess import Finding
from kvscaler_operator.resources import Object

LISTED = 8


def read(obj: Object) -> tuple[InferenceService | None, Finding | None]:
    """The service in an object, and what forbids to act on it. Without the first, always both."""
    too_large = size_fault(obj)
    if too_large is not None:
        return None, Finding(Reason.TOO_LARGE, too_large)
    try:
        service = read_service(obj)
    except InvalidServiceError as error:
        return None, Finding(Reason.INVALID, str(error))
    return service, _fault(service)


def _fault(service: InferenceService) -> Finding | None:
    spec = service.spec
    paths = not_implemented(spec)
    if paths:
        words = (
            f"this version does not act on {', '.join(paths[:LISTED])}: set "
            f"{'it' if len(paths) == 1 else 'them'} back to the default. Until then nothing new is "
            "made for this service, and what runs is left as it is"
        )
        return Finding(Reason.NOT_IMPLEMENTED, words)
    conflicts = argument_conflicts(spec)
    if conflicts:
        return Finding(Reason.ARG_CONFLICT, "; ".join(conflicts[:LISTED]))
    conflicts = template_conflicts(spec)
    if conflicts:
        return Finding(Reason.TEMPLATE_CONFLICT, "; ".join(conflicts[:LISTED]))
    return None
