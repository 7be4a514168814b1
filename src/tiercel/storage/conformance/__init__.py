"""The contract of `storage.base` as checks that any store can be put through, ours or yours.

from tiercel.storage.conformance import Subject, run_checks

for result in run_checks(Subject(open=lambda: MyStore("somewhere/empty"))):
    print(result)
"""

from tiercel.storage.conformance.run import run_checks
from tiercel.storage.conformance.samples import Subject

__all__ = ["Subject", "run_checks"]
