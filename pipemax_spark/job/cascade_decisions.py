"""What the sampled rows of an epoch decide for each answer of a row: recorded once, before anything is kept by it."""

from collections.abc import Mapping, Sequence

from pipemax_spark.cascade.batches import ClosedBatch, Decision, OpenBatch, closed_json
from pipemax_spark.cascade.certificate import Certificate, certify
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ordered_rows import LabelledRow
from pipemax_spark.errors import JobFailedError
from pipemax_spark.storage.cascade_store import CascadeStore

DRAW, CERTIFICATE = "draw", "certificate"
"""The names of an epoch's records. Of a draw with questions, each certificate is a record that ends in its name."""


def decided(
    store: CascadeStore,
    drawn: Draw | OpenBatch,
    labelled: Mapping[str, Sequence[LabelledRow]],
    num_sampled: int,
) -> Mapping[str, Decision]:
    """Return the certificates of a draw, or the closed batch of the ledgers, by the names of a row's answers.

    ``labelled`` are the rows that both models have answered, by the same names. Raise ``JobFailedError`` if they are
    not as many as were sampled.
    """
    if isinstance(drawn, Draw):
        return {
            name: _certificate(store, f"{CERTIFICATE}{name and '_'}{name}", drawn, rows, num_sampled)
            for name, rows in labelled.items()
        }
    if (text := store.record(CERTIFICATE)) is None:
        closed = drawn.close(labelled)
        for of_answer in closed.values():
            _check_all_there(store, of_answer, num_sampled)
        text = store.put(CERTIFICATE, closed_json(closed))
    return ClosedBatch.all_from_json(text)


def _certificate(
    store: CascadeStore, name: str, draw: Draw, labelled: Sequence[LabelledRow], num_sampled: int
) -> Certificate:
    if (text := store.record(name)) is None:
        certificate = certify(draw, labelled)
        _check_all_there(store, certificate, num_sampled)
        text = store.put(name, certificate.to_json())
    return Certificate.from_json(text)


def _check_all_there(store: CascadeStore, decision: Decision, num_sampled: int) -> None:
    if decision.sampled_rows != num_sampled:
        raise JobFailedError(
            f"{num_sampled:,} rows were sampled and {decision.sampled_rows:,} of them have a large answer: "
            f"files of {store.path('labels')} were lost. Nothing is certified"
        )
