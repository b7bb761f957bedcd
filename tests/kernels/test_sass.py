"""Wrong addresses of wgmma in excerpts of what ptxas 12.8 made for compute capability 9.0."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "kernels" / "benchmarks" / "sass.py"
SPEC = importlib.util.spec_from_file_location("sass", FILE)
sass = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sass)

PTX = """
or.b64 %rd48, %rd4, -4611685949707911168;
add.s64 %rd49, %rd4, -4611685949707911136;
"""
RIGHT = """
/*0150*/ UMOV UR4, 0x400 ;
/*0190*/ S2UR UR5, SR_CgaCtaId ;
/*0210*/ ULEA UR43, UR5, UR4, 0x18 ;
.L_x_1:
/*4bf0*/ UIADD3 UR4, UR43, 0x2000, URZ ;
/*4c90*/ USHF.R.U32.HI UR4, URZ, 0x4, UR4 ;
/*4d00*/ USGXT.U32 UR4, UR4, 0xe ;
/*4dd0*/ UIADD3 UR6, UP0, UR4, 0x20, URZ ;
/*4de0*/ UMOV UR4, URZ ;
/*4df0*/ UIADD3.X UR7, UR4, -0x3ffffff0, URZ, UP0, !UPT ;
/*4e00*/ UMOV UR22, UR6 ;
/*4e10*/ UMOV UR23, UR7 ;
/*4e20*/ HGMMA.64x16x16.F32.BF16 R32, R28, gdesc[UR20].tnspB, R32 ;
/*4e30*/ UIADD3.64 UR18, UR22, 0x20, URZ ;
/*4e40*/ UIADD3.64 UR14, UR22, 0x40, URZ ;
/*4e50*/ HGMMA.64x16x16.F32.BF16 R32, R40, gdesc[UR16].tnspB, R32 ;
/*4e80*/ HGMMA.64x16x16.F32.BF16 R32, R52, gdesc[UR12].tnspB, R32, gsb0 ;
/*8cf0*/ @P0 BRA `(.L_x_1) ;
/*8d00*/ EXIT ;
"""
# The same kernel as it was: UR4 still holds a parameter where the descriptor's address is wanted.
A_PARAMETER = """
/*0110*/ ULDC UR4, c[0x0][0x484] ;
/*4da0*/ UIADD3 UR8, UP0, UR4, 0x20, URZ ;
/*4db0*/ UIADD3.X UR9, UR4, -0x3ffffff0, URZ, UP0, !UPT ;
/*4dc0*/ UMOV UR22, UR8 ;
/*4dd0*/ UMOV UR23, UR9 ;
/*4de0*/ HGMMA.64x16x16.F32.BF16 R32, R28, gdesc[UR20].tnspB, R32 ;
/*4df0*/ UIADD3.64 UR18, UR22, 0x20, URZ ;
/*4e10*/ HGMMA.64x16x16.F32.BF16 R32, R48, gdesc[UR16].tnspB, R32 ;
"""


def wrong(text):
    return [line.split(":")[0] for line in sass.wrong_addresses(text, PTX)]


def test_excerpts():
    assert wrong(RIGHT) == []
    assert wrong(A_PARAMETER) == ["4de0", "4e10"]
    assert "UR22 from ['32', 'c[0x0][0x484]']" in sass.wrong_addresses(A_PARAMETER, PTX)[0]


BASE = "/*4c90*/ USHF.R.U32.HI UR4, URZ, 0x4, UR4 ;"
EVERY = ["4e20", "4e50", "4e80"]


@pytest.mark.parametrize(
    ("line", "other", "found"),
    [
        ("/*0190*/ S2UR UR5, SR_CgaCtaId ;", "", EVERY),  # nothing wrote it before
        ("/*4d00*/ USGXT.U32 UR4, UR4, 0xe ;", "", EVERY),  # an address where a descriptor's field is wanted
        ("/*4de0*/ UMOV UR4, URZ ;", "", EVERY),  # something is added to the upper word
        ("-0x3ffffff0", "-0x7fffffe0", EVERY),  # a layout that the PTX does not have
        ("/*4e30*/ UIADD3.64 UR18, UR22, 0x20, URZ ;", "", EVERY[1:2]),
        (BASE, f"/*4c80*/ R2UR UR4, R2 ;\n{BASE}", EVERY),  # from a register that nothing wrote
        (BASE, f"/*4c80*/ UMOV UR4, 0x3 ;\n{BASE}", EVERY),  # from a constant alone
        (BASE, f"/*4c80*/ @P1 UMOV UR4, 0x3 ;\n{BASE}", EVERY),  # overwritten now and then
        (BASE, f"/*4c70*/ UMOV UR4, URZ ;\n/*4c80*/ @P1 UMOV UR4, UR43 ;\n{BASE}", EVERY),  # made now and then
        (BASE, f"/*4c80*/ ULOP3.LUT UP0, UR4, UR44, 0x1, URZ, 0xc0, !UPT ;\n{BASE}", EVERY),  # with a predicate
        ("/*8cf0*/", "/*8ce0*/ ULDC UR43, c[0x0][0x484] ;\n/*8cf0*/", EVERY),  # from the second pass of the loop on
    ],
)
def test_what_is_lost_shows(line, other, found):
    assert line in RIGHT
    assert wrong(RIGHT.replace(line, other)) == found


STACK = """
/*4c50*/ MOV R2, UR4 ;
/*4c60*/ STL [R1+0x10], R2 ;
/*4c70*/ LDL R3, [R1+0x10] ;
/*4c80*/ R2UR UR4, R3 ;
"""
SWAP = """
/*4c50*/ ULOP3.LUT UR6, UR6, UR4, URZ, 0x3c, !UPT ;
/*4c60*/ ULOP3.LUT UR4, UR6, UR4, URZ, 0x3c, !UPT ;
/*4c70*/ ULOP3.LUT UR6, UR6, UR4, URZ, 0x3c, !UPT ;
/*4c80*/ UMOV UR4, UR6 ;
"""


@pytest.mark.parametrize(
    ("line", "other"), [(BASE, STACK + BASE), (BASE, SWAP + BASE), (" UR22, 0x20,", " UR22, -0x20,")]
)
def test_an_address_may_travel(line, other):
    """Over the stack and back, through two registers swapped, downwards."""
    assert line in RIGHT
    assert wrong(RIGHT.replace(line, other)) == []
