# SPDX-License-Identifier: Apache-2.0
"""What every MHLA model must do: a test class mixes a model's case with these."""

from tests.families.adapter_checks import AdapterChecks
from tests.families.compile_checks import CompileChecks
from tests.families.memory_checks import InPlaceChecks, MemoryChecks
from tests.families.saving_checks import SavingChecks
from tests.families.training_checks import TrainingChecks


class EagerChecks(SavingChecks, TrainingChecks, AdapterChecks, MemoryChecks, InPlaceChecks):
    """All but compilation."""


class ModelChecks(EagerChecks, CompileChecks):
    """All."""
