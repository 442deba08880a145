"""Checks that no class of the plan, the scalers and the bindings does too much.

Methods count in every class, fields only if some are private. Overloads count; constructors,
destructors, operators and deleted functions don't. Prints the classes above the limits, or with
``--all`` every class, and exits with 1 if one is above.
"""

import re
import sys
from pathlib import Path

FOLDERS = ["csrc/optimizer", "csrc/scaler", "csrc/python", "csrc/libtorch"]
MOST_METHODS, MOST_FIELDS = 30, 12
COMMENT_OR_TEXT = re.compile(r"//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'")
CLASS = re.compile(r"\b(?<!enum )(?:class|struct)(?: AMP_EXT_API)? ([\w:]+)[^;{}()]*\{")
NO_MEMBER = re.compile(r"(using|friend|static_assert|enum)\b|(struct|class) [\w:]+( .*\})?$")
TEMPLATE_ARGUMENTS = re.compile(r"<([^<>]|<([^<>]|<[^<>]*>)*>)*>")
NO_METHOD = re.compile(r"= delete$|\boperator\b")


def outside_braces(text: str) -> str:
    """Returns the text up to the brace that closes it, without what nested braces contain."""
    depth, flat = 0, ""
    for char in text:
        depth -= char == "}"
        if depth < 0:
            break
        flat += char if depth == 0 else ""
        depth += char == "{"
    return flat


def count(name: str, body: str) -> tuple[int, int]:
    """Returns how many methods and how many fields a class has."""
    methods = fields = 0
    has_private = "private:" in body
    body = re.sub(r"= \{\}|\b(public|private|protected):", "", " ".join(body.split()))
    for member in re.sub(r"\) ([\w ]*|: [^;]*?)\{\}", r") \1;", body).split(";"):
        declared = re.sub(r"^template <[^()]*?> ", "", member.strip())
        if not declared or NO_MEMBER.match(declared):
            continue
        bare = TEMPLATE_ARGUMENTS.sub("", declared)
        if "(" in bare.split("=")[0].split("{")[0]:
            is_constructor = re.search(rf"(^| |~){name.split('::')[-1]}\(", declared)
            methods += not is_constructor and not NO_METHOD.search(declared)
        else:
            fields += has_private
    return methods, fields


wrong = 0
for path in sorted(p for f in FOLDERS for p in Path(f).iterdir() if p.suffix in (".h", ".cpp")):
    text = COMMENT_OR_TEXT.sub("", path.read_text())
    for found in CLASS.finditer(text):
        methods, fields = count(found[1], outside_braces(text[found.end() :]))
        is_wrong = methods > MOST_METHODS or fields > MOST_FIELDS
        wrong += is_wrong
        if is_wrong or "--all" in sys.argv:
            print(f"{path}: {found[1]} has {methods} methods and {fields} fields")
sys.exit(int(wrong > 0))
