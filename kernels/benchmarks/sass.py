"""What the addresses of wgmma are made of: a data flow analysis of machine code of compute capability 9.0."""

import re

INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([\w.]+)\s*(.*?)\s*;")
LABEL = re.compile(r"\s*(\.L_\w+):")
REGISTER = re.compile(r"\b(U?R)(\d+)\b")
SOURCE = re.compile(r"\bc\[\w+\]\[[^\]]+\]|\bSR_\w+|-?\b0x[0-9a-f]+\b")
JUMPS = {"BRA", "BRX", "CALL", "EXIT", "RET"}
OPAQUE = {"LD", "LDG", "LDS", "LDL", "LDSM", "ATOM", "ATOMG", "ATOMS", "HMMA", "HGMMA"}  # none makes an address
SHARED = "SR_CgaCtaId"  # every address of shared memory starts from it
FIELD = {14, 15, 0x3FFF, 0x7FFF}  # bits and masks by which a descriptor's address is cut out
UNDEFINED = frozenset({"undefined"})


def words_written(operation: str) -> int:
    """Registers of 32 bits that an operation writes."""
    if product := re.match(r"HGMMA\.\d+x(\d+)x", operation):
        return int(product[1]) // 2
    if re.search(r"^HMMA|\.128|88\.4", operation):
        return 4
    return 2 if re.search(r"\.64$|\.64\.|\.WIDE|88\.2|^CS2R$", operation) and ".HI" not in operation else 1


def assignments(operation: str, text: str) -> list:
    """(place, places read, other sources) of each word written; a place is a register or a word of the stack."""
    name, count = operation.split(".")[0], words_written(operation)
    operands = [x.strip() for x in text.split(",")]
    while operands and re.fullmatch(r"U?P[\dT]", operands[0]):  # predicates written come first; they are not followed
        operands.pop(0)
    stack = re.search(r"\[R1(?:\+(0x[0-9a-f]+))?\]", text)
    if stack and name in ("LDL", "STL"):
        value = REGISTER.match(operands[name == "STL"])
        slots = [f"stack+{int(stack[1] or '0', 16) + 4 * i}" for i in range(count)]
        values = [f"{value[1]}{int(value[2]) + i}" for i in range(count)] if value else []
        if name == "STL":
            return [(slot, values[i : i + 1], frozenset()) for i, slot in enumerate(slots)]
        return [(place, [slots[i]], frozenset()) for i, place in enumerate(values)]
    written = REGISTER.fullmatch(operands[0]) if operands else None
    if not written or "SETP" in name or name in JUMPS:
        return []
    places = [f"{written[1]}{int(written[2]) + i}" for i in range(count)]
    if name in OPAQUE:
        return [(place, [], frozenset({name})) for place in places]
    rest = ",".join(operands[1:])
    reads = [(kind, int(n)) for kind, n in REGISTER.findall(rest)]
    sources = frozenset(int(x, 16) % 2**32 if "0x" in x[:3] else x for x in SOURCE.findall(rest))
    if operation == "UIADD3.64":  # the upper word from the upper words
        return [(p, [f"{k}{n + i}" for k, n in reads], frozenset() if i else sources) for i, p in enumerate(places)]
    if name in ("LOP3", "ULOP3") and len(reads) == 2 and sources == {0x3C}:
        sources = frozenset({"exclusive or"})
    return [(place, [f"{kind}{n}" for kind, n in reads], sources) for place in places]


def basic_blocks(sass: str) -> list:
    """(instructions, numbers of the following blocks) of each basic block.

    An instruction is (address, whether it has a predicate, operation, operands, what `assignments` says).
    """
    blocks, labels, closed = [[]], {}, set()
    for line in sass.splitlines():
        if label := LABEL.match(line):
            blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif m := INSTRUCTION.match(line):
            address, predicate, operation, text = m.groups()
            blocks[-1].append((address, bool(predicate), operation, text, assignments(operation, text)))
            if operation.split(".")[0] in JUMPS:
                if not predicate and re.match(r"EXIT|RET|BRX|BRA`", operation + text):
                    closed.add(len(blocks) - 1)
                blocks.append([])
    found = []
    for i, block in enumerate(blocks):
        targets = re.findall(r"\.L_\w+", block[-1][3]) if block and block[-1][2].split(".")[0] in JUMPS else []
        after = [i + 1] if i not in closed and i + 1 < len(blocks) else []
        found.append((block, [labels[x] for x in targets if x in labels] + after))
    return found


def joined(a: frozenset, b: frozenset) -> frozenset:
    """Sources of a word that comes from one of two places: an address stays one only if both are addresses."""
    return a | b if (SHARED in a) == (SHARED in b) else a | b | {"another value"}


def value_of(state: dict, reads: list, sources: frozenset) -> frozenset:
    """Sources of what an instruction computes."""
    values = [state.get(x, UNDEFINED) for x in reads]
    if "exclusive or" in sources:  # two registers swapped in three steps
        return values[0] ^ values[-1]
    return sources.union(*values)


def flaws(state: dict, operands: str, upper: set) -> str:
    """What is wrong with the descriptors in shared memory of one wgmma, "" if nothing."""
    n, found = int(re.search(r"gdesc\[UR(\d+)\]", operands)[1]), []
    first_in_registers = re.match(r"\w+, R\d+", operands)
    for i in (n + 2,) if first_in_registers else (n, n + 2):
        low, high = (state.get(f"UR{j}", UNDEFINED) for j in (i, i + 1))
        foreign = {x for x in low if isinstance(x, str)} - {SHARED, "SR_TID"}
        if foreign or SHARED not in low or not low & FIELD:
            found.append(f"UR{i} from {sorted(map(str, low))}")
        high = {x for x in high if isinstance(x, str) or 0xFFFF < x < 0xFFFFFFFF}
        if len(high) != 1 or not high <= upper:
            found.append(f"UR{i + 1} from {sorted(map(str, high))}")
    return ", ".join(found)


def wrong_addresses(sass: str, ptx: str) -> list:
    """The wgmma of a kernel that read shared memory through something that is no address, as "place: registers".

    sass is the text of `nvdisasm -c` for compute capability 9.0, ptx the text that it was compiled from. Each word that
    an instruction writes to a register or to the stack is followed, along all branches, as the set of what it was made
    from: constants, parameters, special registers, loads. The lower word of a descriptor must come from the start of
    shared memory, cut to its field, and otherwise only from constants and the thread's index; its upper word from one
    64-bit constant of the PTX. So a register that ptxas lost shows, be it that nothing wrote it or something else did.

    Not seen: an address of another buffer in shared memory, a wrong constant added to the right start, the layout of
    another buffer; predicates, carries and what goes through memory other than the stack; and operations but wgmma.
    """
    numbers = {int(x) for line in ptx.splitlines() if "%rd" in line for x in re.findall(r"-?\b\d+\b", line)}
    upper = {x % 2**64 >> 32 for x in numbers if abs(x) >> 32}
    upper |= {x ^ 0xFFFFFFFF for x in upper}  # subtracted instead of added
    blocks = basic_blocks(sass)
    entries, todo = {0: {}}, [0]
    wrong = {x[0]: "never reached" for block, _ in blocks for x in block if x[2].startswith("HGMMA")}
    while todo:
        block, following = blocks[i := todo.pop()]
        state = dict(entries[i])
        for address, predicated, operation, operands, writes in block:
            if operation.startswith("HGMMA"):
                wrong[address] = flaws(state, operands, upper)
            new = {place: value_of(state, reads, sources) for place, reads, sources in writes}
            if predicated:
                new = {place: joined(value, state.get(place, UNDEFINED)) for place, value in new.items()}
            state |= new
        for j in following:
            before = entries.get(j, state)
            both = {x: joined(before.get(x, UNDEFINED), state.get(x, UNDEFINED)) for x in before | state}
            if both != entries.get(j):
                entries[j] = both
                todo.append(j)
    return [f"{address}: {text}" for address, text in sorted(wrong.items()) if text]
