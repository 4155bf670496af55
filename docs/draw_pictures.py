# ruff: noqa: E501, INP001
"""Draw the pictures of the docs: ``python docs/draw_pictures.py`` writes docs/images/*.svg.

Each has a background of its own, so that it is readable on a light and on a dark page.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
_STYLE = """
text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #1f2328 }
.small { font-size: 11px; fill: #59636e }
.bold { font-weight: 600 }
.mono { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px }
.middle { text-anchor: middle }
.panel { fill: #ffffff; stroke: #d1d9e0 }
.box { fill: #eef4fb; stroke: #54708f }
.old { fill: #fdf0dc; stroke: #a86a08 }
.new { fill: #e2f4e6; stroke: #2f7d43 }
.bad { fill: #fbe6e4; stroke: #b3382c }
.plain { fill: #f6f8fa; stroke: #818b98 }
.line { stroke: #59636e; stroke-width: 1.5; fill: none }
.thick { stroke: #2f7d43; stroke-width: 3; fill: none }
.dashed { stroke-dasharray: 5 4 }
.head { fill: #59636e }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.small { fill: #9da7b3 }
.panel { fill: #0d1117; stroke: #3d444d }
.box { fill: #15263b; stroke: #6f9ccd }
.old { fill: #33260f; stroke: #d29a3a }
.new { fill: #12301b; stroke: #57ab6b }
.bad { fill: #3a1714; stroke: #e5756a }
.plain { fill: #161b22; stroke: #656c76 }
.line { stroke: #9da7b3 }
.thick { stroke: #57ab6b }
.head { fill: #9da7b3 }
}
"""
_MARKER = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" class="head"/></marker>'
)
_LINE_PX = 17


@dataclass(slots=True)
class Picture:
    """An SVG in the making; all coordinates are pixels."""

    width: int
    height: int
    title: str
    description: str
    shapes: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Lines of text, the first one's baseline at ``y``."""
        for number, line in enumerate(words.split("\n")):
            place = f'x="{x:g}" y="{y + number * _LINE_PX:g}" xml:space="preserve"'
            self.shapes.append(f'<text {place} class="{kind}">{escape(line)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, words: str, kind: str = "box"
    ) -> None:
        """A box with its words in the middle, the first line bold."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.shapes.append(f'<rect {size} rx="6" class="{kind}"/>')
        heading, *rest = words.split("\n")
        top = y + height / 2 - len(rest) * _LINE_PX / 2 + 4.5
        self.text(x + width / 2, top, heading, "middle bold")
        self.text(x + width / 2, top + _LINE_PX, "\n".join(rest), "middle small")

    def arrow(self, *points: tuple[float, float], kind: str = "line") -> None:
        """A line through points with a head at its end."""
        self.path(*points, kind=kind, end='marker-end="url(#head)"')

    def path(self, *points: tuple[float, float], kind: str = "line", end: str = "") -> None:
        """A line through points."""
        through = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.shapes.append(f'<polyline points="{through}" class="{kind}" {end}/>')

    def svg(self) -> str:
        """The whole file."""
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
        inner = f'width="{self.width - 2}" height="{self.height - 2}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="desc">{escape(self.description)}</desc>',
                f"<style>{_STYLE}</style>",
                f"<defs>{_MARKER}</defs>",
                f'<rect x="1" y="1" {inner} rx="8" class="panel"/>',
                *self.shapes,
                "</svg>",
                "",
            ]
        )


def data_flow() -> Picture:
    """From a registered model to a release that is watched."""
    it = Picture(
        880,
        330,
        "How data flows through Enginegate",
        "A model becomes an FP32 ONNX model and then one engine for each precision and kind. Each "
        "engine is judged against FP32 and benchmarked under Triton. Verdicts and benchmarks make "
        "a scorecard with one digest. A person approves that digest, a promotion publishes those "
        "bytes to the live Triton repository, and a watch compares live traffic with the promise.",
    )
    it.text(20, 28, "enginegate qualify", "mono")
    it.box(20, 42, 140, 56, "Your model\nMLflow, file, encoder")
    it.box(190, 42, 140, 56, "ONNX in FP32\nanswers as trained")
    it.box(360, 42, 150, 56, "Engines\nfp32 fp16 int8 fp8 …")
    it.box(560, 42, 150, 56, "Benchmark\np99 SLO, under Triton")
    it.box(560, 122, 150, 56, "Verdict\nas right as FP32?")
    it.box(190, 122, 140, 56, "Labelled data\nand live requests", "plain")
    it.box(750, 82, 112, 56, "Scorecard\none digest")
    it.arrow((160, 70), (188, 70))
    it.arrow((330, 70), (358, 70))
    it.arrow((510, 70), (558, 70))
    it.arrow((435, 98), (435, 138), (558, 138))
    it.arrow((330, 162), (558, 162))
    it.text(345, 156, "reference: FP32's answers", "small")
    it.arrow((710, 70), (730, 70), (730, 102), (748, 102))
    it.arrow((710, 150), (730, 150), (730, 118), (748, 118))
    it.arrow((806, 138), (806, 228))
    it.text(716, 205, "enginegate\napprove", "mono")
    it.box(750, 230, 112, 56, "A person\nsays yes or no", "plain")
    it.box(500, 230, 180, 56, "Live Triton repository\nthe bytes that passed", "new")
    it.box(270, 230, 170, 56, "Watch\nlive against promised")
    it.box(60, 230, 150, 56, "Alert or rollback\nas the policy says", "plain")
    it.arrow((750, 258), (682, 258))
    it.text(690, 250, "promote", "mono")
    it.arrow((500, 258), (442, 258))
    it.text(452, 250, "watch", "mono")
    it.arrow((270, 258), (212, 258))
    it.arrow((135, 286), (135, 308), (590, 308), (590, 288))
    it.text(320, 303, "rollback", "mono")
    return it


_STEPS = (
    ("1 check", "lock held; journal, audit log and commit point agree;\nrelease 2 is live, as expected"),
    ("2 number", "3, which was never used before; journal: intent"),
    ("3 stage", "bytes in a hidden folder, digests checked, flushed,\nmoved in by rename: MODEL/3/ and its records"),
    ("4 sign", "MODEL/00/releases/3.sig.json"),
    ("5 journal", "journal: placed, with the manifest's digest"),
    ("6 load beside", "of an ensemble: composing models serve 2 and 3;\njournal: prepared"),
    ("7 switch", "config.pbtxt names 2 and 3; Triton loads 3 while 2\nanswers, then 3 answers; journal: configured, loaded"),
    ("8 prove", "index, digest and golden answers, asked of Triton"),
    ("9 commit", ".enginegate-current.MODEL.json replaced by one rename"),
    ("10 record, retain", "audit log: published; journal: done;\nbytes beyond retention.releases removed"),
)  # fmt: skip
_ROW_PX = 48


def promotion_steps() -> Picture:
    """Ten steps, and what the next start does after a kill at each."""
    top = 58
    it = Picture(
        880,
        top + 10 * _ROW_PX + 16,
        "The ten steps of a promotion, and what a kill at each leaves",
        "Steps 1 to 8 prepare release 3 while release 2 is what the commit point names: a kill "
        "there makes the next start restore release 2. Step 9 replaces the commit point by one "
        "rename. A kill after it leaves release 3 live, and the next start finishes the records.",
    )
    it.text(24, 30, "Step", "bold")
    it.text(170, 30, "On disk and on the server afterwards", "bold")
    it.text(610, 30, "Killed here, the next start …", "bold")
    for number, (name, words) in enumerate(_STEPS):
        y = top + number * _ROW_PX
        it.path((20, y - 12), (590, y - 12), kind="line dashed")
        it.text(24, y + 14, name, "bold")
        it.text(170, y + (6 if "\n" in words else 14), words)
    for first, last, kind, words in (
        (0, 1, "plain", "finds nothing to repair"),
        (1, 5, "old", "removes what was staged.\nRelease 2 served all the time:\nno server had loaded 3."),
        (5, 8, "old", "writes config.pbtxt for 2 again,\nloads and proves 2,\nthen removes what was staged."),
        (8, 9, "new", "before the rename: as above;\nafter it: 3 stands"),
        (9, 10, "new", "completes journal, audit log\nand deletions. 3 stands."),
    ):  # fmt: skip
        height = (last - first) * _ROW_PX - 6
        size = f'x="610" y="{top + first * _ROW_PX - 10}" width="246" height="{height}"'
        it.shapes.append(f'<rect {size} rx="6" class="{kind}"/>')
        lines = words.count("\n")
        middle = top + first * _ROW_PX - 10 + height / 2 - lines * _LINE_PX / 2 + 4.5
        it.text(622, middle, words)
    commit = top + 8 * _ROW_PX - 12
    it.path((20, commit), (860, commit), kind="thick")
    return it


def repository_tree() -> Picture:
    """What is where in a live repository."""
    rows = (
        ("ROOT/", "target.repository: the folder that Triton reads"),
        ("├── .enginegate.lock", "who is changing it now"),
        ("├── .enginegate-journal.jsonl", "steps of every change, hash-chained"),
        ("├── .enginegate-audit.jsonl", "who did what, when and why, hash-chained"),
        ("├── .enginegate-current.digits.json", "the commit point: release 3 is live, 2 stands by"),
        ("├── .enginegate-fleet.digits.json", "only while a roll-out to several servers is under way"),
        ("└── digits/", "one folder for each model"),
        ("    ├── config.pbtxt", "which versions serve, with each release's digest"),
        ("    ├── 2/", "the bytes of release 2, still loaded"),
        ("    ├── 3/", "the bytes of release 3, live"),
        ("    │   ├── model.onnx  engine.json  model.py", "read-only, listed in the manifest"),
        ("    └── 00/releases/", "our records; Triton takes 00 for no version"),
        ("        ├── 3.json", "the manifest: digest of every file, approvals, promise"),
        ("        ├── 3.golden.npz", "samples with the validated engine's answers"),
        ("        ├── 3.sig.json", "the signature on manifest, samples and bytes"),
        ("        └── 3.promise-DIGEST.json", "only where it was given another promise since"),
    )  # fmt: skip
    it = Picture(
        880,
        40 + len(rows) * 23,
        "The files of a live repository",
        "In the root are the lock, journal, audit log and one commit point for each model, as "
        "files that Triton ignores. Each model has a folder with config.pbtxt, one numbered folder "
        "for the bytes of each release, and 00/releases with manifests, golden samples and "
        "signatures.",
    )
    for number, (path, meaning) in enumerate(rows):
        y = 34 + number * 23
        if "current" in path:
            size = f'x="14" y="{y - 16}" width="852" height="23"'
            it.shapes.append(f'<rect {size} rx="4" class="new"/>')
        it.text(24, y, path, "mono")
        it.text(410, y, meaning)
    return it


def fleet_and_storage() -> Picture:
    """A promotion to several servers and to object storage."""
    it = Picture(
        880,
        400,
        "A promotion with a fleet and object storage",
        "The promoting host stages the release, uploads it and reads it back, publishes on the "
        "canary and watches it, then goes through its other servers one at a time. Replacing "
        "current.json in the bucket makes it live. Other hosts pull: they fetch, check every "
        "digest, and publish their copy locally.",
    )
    it.text(24, 32, "The promoting host and its fleet", "bold")
    it.path((300, 48), (300, 384), kind="line dashed")
    it.path((620, 48), (620, 384), kind="line dashed")
    it.box(24, 52, 236, 52, "Local repository\n1  release 3 staged, served by nobody", "plain")
    it.box(24, 138, 236, 56, "Canary: the first server\n3  loaded, proved, watched canary_s", "new")
    it.box(24, 228, 236, 52, "Server gpu-2, same folder\n4  next, with proof", "old")
    it.box(24, 314, 236, 52, "Server edge, own folder\n5  last: a copy, with proof", "old")
    it.arrow((142, 104), (142, 136))
    it.arrow((142, 194), (142, 226))
    it.arrow((142, 280), (142, 312))
    it.text(340, 32, "Bucket: s3://models/live/digits", "bold")
    it.box(340, 52, 240, 52, "3/…  releases/3.json\n2  uploaded, read back, compared", "plain")
    it.box(340, 138, 240, 52, "journal/00000042.json …\nwritten only where none is", "plain")
    it.box(
        340,
        314,
        240,
        52,
        "current.json names release 3\n6  replaced if nobody else did: live",
        "new",
    )
    it.arrow((260, 78), (338, 78))
    it.arrow((260, 340), (338, 340))
    it.text(
        340,
        228,
        "After a failure or a kill before 6\nthese servers return to release 2,\nthe last one first: current.json\nnever named release 3.",
        "small",
    )
    it.text(656, 32, "Every other host", "bold")
    it.box(656, 314, 200, 52, "enginegate pull\n7  on its schedule", "plain")
    it.box(656, 228, 200, 52, "Fetch, check\nmanifest and every file", "plain")
    it.box(656, 138, 200, 56, "Local repository\nthe ten steps of a promotion", "plain")
    it.box(656, 52, 200, 52, "Its own Triton\nreads the local copy", "new")
    it.arrow((580, 340), (654, 340))
    it.arrow((756, 314), (756, 282))
    it.arrow((756, 228), (756, 196))
    it.arrow((756, 138), (756, 106))
    return it


def four_outcomes() -> Picture:
    """An interval against a margin."""
    it = Picture(
        880,
        314,
        "An interval against a margin gives one of four outcomes",
        "A gate passed when the whole interval is within the margin, failed when the whole "
        "interval is beyond it, and is inconclusive when the margin lies inside the interval. It "
        "is errored when the check broke and there is no interval.",
    )
    limit, left, right = 470, 190, 650
    it.text(left, 34, "within the margin", "small")
    it.text(limit + 14, 34, "beyond it", "small")
    it.path((limit, 22), (limit, 244), kind="line dashed")
    for row, (name, low, high, kind, words) in enumerate(
        (
            ("passed", 240, 420, "new", "the whole interval is within"),
            ("inconclusive", 380, 560, "old", "more samples would decide;\nthe finding says how many"),
            ("failed", 510, 620, "bad", "the whole interval is beyond"),
            ("errored", 0, 0, "plain", "the check broke: no interval,\nnothing was found out"),
        )
    ):  # fmt: skip
        y = 66 + row * 50
        it.text(24, y + 5, name, "bold")
        it.text(670, y + (-3 if "\n" in words else 5), words, "small")
        if high:
            size = f'x="{low}" y="{y - 8}" width="{high - low}" height="16"'
            it.shapes.append(f'<rect {size} rx="3" class="{kind}"/>')
            middle = (low + high) / 2
            it.path((middle, y - 8), (middle, y + 8))
        else:
            it.text((left + right) / 2 + 30, y + 5, "?", "bold middle")
    it.arrow((left, 248), (right, 248))
    it.text(left, 270, "0", "small")
    it.text(limit, 270, "margin, e.g. max_accuracy_loss = 0.01", "small middle")
    it.text(right, 270, "loss against FP32", "small middle")
    it.text(
        24,
        298,
        "The worst outcome of all gates is the verdict. No evidence is inconclusive, never passed.",
    )
    return it


PICTURES: dict[str, Callable[[], Picture]] = {
    "data-flow": data_flow,
    "promotion-steps": promotion_steps,
    "repository-tree": repository_tree,
    "fleet-and-storage": fleet_and_storage,
    "four-outcomes": four_outcomes,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg())
