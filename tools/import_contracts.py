"""An import contract that lists what a package may import; anything else is forbidden.

import-linter's own contracts list what is forbidden, so a new dependency passes them unseen. The standard library and
the package itself are always allowed. Only direct imports are checked: what an allowed module imports is its own
contract's concern.
"""

import sys
from collections.abc import Iterable
from typing import Any

from importlinter import Contract, ContractCheck, fields, output


class MayImportContract(Contract):
    """``packages`` import nothing but each other, ``may_import`` and ``exceptions``."""

    type_name = "may_import"

    packages: Any = fields.SetField(subfield=fields.StringField())
    may_import: Any = fields.SetField(subfield=fields.StringField())
    """Modules, and packages with everything in them; for other distributions the top-level name."""
    exceptions: Any = fields.SetField(subfield=fields.StringField(), required=False)
    """Single imports, as ``importer -> imported``. One that is not there breaks the contract too."""

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        allowed = {*self.packages, *self.may_import}
        unused = set(self.exceptions or ())
        violations = []
        for package in sorted(self.packages):
            for importer in sorted({package} | graph.find_descendants(package)):
                for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                    if _is_in(imported, allowed) or imported.partition(".")[0] in sys.stdlib_module_names:
                        continue
                    name = f"{importer} -> {imported}"
                    if name in (self.exceptions or ()):
                        unused.discard(name)
                    else:
                        violations.append(name)
        return ContractCheck(
            kept=not violations and not unused,
            metadata={"violations": violations, "unused": sorted(unused)},
        )

    def render_broken_contract(self, check: ContractCheck) -> None:
        for name in check.metadata["violations"]:
            output.print_error(f"{name}: not among what may be imported", bold=False)
        for name in check.metadata["unused"]:
            output.print_error(f"{name}: an exception for an import that is not there", bold=False)
        output.new_line()


def _is_in(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
