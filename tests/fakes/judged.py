"""What is read from a judgement of candidates."""

import json


def find(findings, gate_name, scope="evaluation"):
    return next(f for f in findings if (f.gate, f.scope) == (gate_name, scope))


def results_of(judged):
    """Results of the evidence by gate and scope."""
    entries = json.loads(judged.result_json)["results"]
    metas = [entry["expectation_config"]["meta"] for entry in entries]
    return {
        (meta["gate"], meta["scope"]): entry for meta, entry in zip(metas, entries, strict=True)
    }


def worst_slice(findings):
    """The slice with the worst outcome and, among those, the most harm."""

    def harm(finding):
        beyond = finding.value - finding.limit
        return finding.outcome, beyond if finding.relation == "<=" else -beyond

    slices = [f for f in findings if "/" in f.scope and f.value is not None and not f.of_fp32]
    return max(slices, key=harm)
