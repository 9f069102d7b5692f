"""The accelerator that the memory budget is computed for."""

from typing import Annotated, ClassVar

from pydantic import Field

from kvscaler_api.base import ApiModel, Rule
from kvscaler_api.quantities import Quantity


class AcceleratorSpec(ApiModel):
    """One accelerator, by its name in the catalogue or by its figures."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.name) != has(self.memory)",
            "set exactly one of name and memory",
            lambda accelerator: (accelerator.name is None) != (accelerator.memory_bytes is None),
        ),
        Rule(
            "!has(self.bandwidth) || has(self.memory)",
            "bandwidth goes with memory: a named accelerator has its own",
            lambda accelerator: (
                accelerator.bandwidth_bytes_per_second is None
                or accelerator.memory_bytes is not None
            ),
        ),
    )

    name: (
        Annotated[
            str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")
        ]
        | None
    ) = Field(
        None,
        description=(
            "Name in the catalogue, such as nvidia-h100-80gb-hbm3, nvidia-l40s or cpu. For cpu, the"
            " memory is the memory limit of the engine's container. A Pod that finds another"
            " device reports BudgetFits=False/AcceleratorMismatch."
        ),
    )
    memory_bytes: Annotated[int, Quantity()] | None = Field(
        None,
        alias="memory",
        description="Memory of one accelerator that is in no catalogue, such as 80Gi.",
    )
    bandwidth_bytes_per_second: Annotated[int, Quantity()] | None = Field(
        None,
        alias="bandwidth",
        description=(
            "Memory bandwidth in bytes per second, such as 3350G. With it, decode time is"
            " predicted before the first replica has measured it."
        ),
    )
    resource_name: (
        Annotated[
            str,
            Field(
                min_length=1,
                max_length=253,
                pattern=r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
            ),
        ]
        | None
    ) = Field(
        None,
        description=(
            "Extended resource that a Pod requests for each accelerator, such as nvidia.com/gpu."
            " Absent means none is requested, as for cpu; nor is one for the executor Modelled."
        ),
    )
