"""Make the output table ready for a run: create it, or add the columns and the spec that it lacks."""

from pipemax_spark.job.job import JobCall
from pipemax_spark.request.prompts import find_field
from pipemax_spark.rows.annotated import ANNOTATION, annotated_schema, holds_annotations
from pipemax_spark.rows.checked import Checked
from pipemax_spark.storage.spec_properties import spec_property, spec_texts


def make_output(call: JobCall, checked: Checked) -> bool:
    """Create the table, or add what it lacks; return True if it is new or has no annotations yet.

    All changes of its schema happen here: during a running chunk they would make the chunk retry its commit.
    """
    table = call.table
    schema = annotated_schema(checked.schema, ANNOTATION, call.options.generation, call.options.ask)
    is_new = not table.exists()
    is_empty = is_new or not holds_annotations(table.read().schema)
    if is_new:
        table.create(schema)
    is_known = not is_new and checked.spec.hash in spec_texts(table.properties())
    if not is_new:
        held = table.read().schema
        if not is_known or any(find_field(name, held) is None for name in schema.names):
            table.add_columns(schema)
    if not is_known:
        table.set_properties(spec_property(checked.spec.hash, checked.spec.to_json(), call.run_id))
    return is_empty
