"""GGUF kinds whose numbers come by fours or eights from a codebook (IQ1, IQ2, IQ3), and NVFP4: integers and scales.

Owns their block layouts and the codebooks. A value is an integer of at most 8 bits times the scale of its group, so
that a matmul for groups of int8 computes these kinds exactly. It never reads files.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import numpy as np

from headway.kernels.host.quantized import FP4

Parts = tuple[np.ndarray, np.ndarray]  # integers, int8 [B, values], and scales, float32 [B, groups]

# Which combinations of a few numbers a codebook has, in ascending order, the first number the lowest digit: a bit for
# each combination, compressed.
_COMBINATIONS = {
    "IQ2_XXS": (
        "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;is&dxI!#Zg_{KuzkVd"
        "4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbHqcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@"
        "@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7"
    ),
    "IQ2_XS": (
        "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c)w(<-fCU6QVt|)*=>o"
        "J=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVCGbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1yt"
        "ubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL"
        "~oH^Zy%}}tQx4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC"
    ),
    "IQ2_S": (
        "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&YfEj@sgh^u5FBBgC>LAk"
        "BEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$Az"
        "Rb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#"
        "Dw9CRS7mu8OBC|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(Jyj"
        "C6"
    ),
    "IQ3_XXS": (
        "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-c)&}FY<X@1m|7IGsjr"
        "X>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%Xv"
        "Hjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydlNePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5"
    ),
    "IQ3_S": (
        "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!%0~0(%@Ao{OU0lD_x2"
        "OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U"
        "+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;"
        "cl!bD4D3uqR(zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>"
    ),
    "IQ1_S": (
        "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT8mb2WdTox*h^v8Vt"
        "nDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!A"
        "jh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}d"
        "P%c;av8KJU^mWiJv*28-WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}"
        "O@H(bLXvHn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?"
        "+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c"
        "}@u6ikZ68>90+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&"
        "0u-;P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dhe"
        "eu*|v(bMFD;1sQ1"
    ),
}
# What the digits of a combination stand for, and how many there are. IQ1's are eighths: −1, 0 and 1.
_DIGITS = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), ((8, 25, 43), 8)),
    "IQ3_XXS": ((4, 12, 20, 28, 36, 44, 52, 62), 4),
    "IQ3_S": ((1, 3, 5, 7, 9, 11, 13, 15), 4),
    "IQ1_S": ((-8, 0, 8), 8),
}


@cache
def codebook(kind: str) -> np.ndarray:
    """The combinations of a kind, int8 `[count, 4 or 8]`."""
    digits, length = _DIGITS[kind]
    bits = np.frombuffer(zlib.decompress(base64.b85decode(_COMBINATIONS[kind])), np.uint8)
    numbers = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    return np.array(digits, np.int8)[numbers[:, None] // len(digits) ** np.arange(length) % len(digits)]


def integers_and_scales(kind: str, blocks: np.ndarray) -> Parts:
    """Blocks, uint8 `[B, nbytes]`, as integers [B, values] and scales [B, groups]."""
    return _KINDS[kind](blocks)


def steps_of_scales(kind: str, blocks: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales [B, groups] as steps, int8, of which each is worth the block's float16 [B, 1] times 2^EXPONENTS[kind]."""
    half = _iq1_m_half(blocks) if kind == "IQ1_M" else _view(blocks[:, :2], np.float16)
    wide = half.astype(np.float32)
    with np.errstate(invalid="ignore"):
        steps = np.rint(scale * np.float32(2.0 ** -EXPONENTS[kind]) / np.where(wide == 0, np.float32(1), wide))
    return steps.astype(np.int8), half


def _iq2_xxs(blocks: np.ndarray) -> Parts:
    words = _view(blocks[:, 2:], np.uint32).reshape(len(blocks), 8, 2)  # four numbers of the codebook; signs and scale
    numbers = words[..., 0].copy().view(np.uint8).reshape(len(blocks), -1)
    scale = _half(blocks) * (np.float32(0.5) + _floats(words[..., 1] >> 28)) * np.float32(0.25)
    return _signed(codebook("IQ2_XXS")[numbers], _packed_signs(words[..., 1])), scale


def _iq2_xs(blocks: np.ndarray) -> Parts:
    words = _view(blocks[:, 2:66], np.uint16)  # 9 bits of a number, 7 of its signs
    return _signed(codebook("IQ2_XS")[words & 511], _even(words >> 9)), _quarter_scales(blocks, blocks[:, 66:])


def _iq2_s(blocks: np.ndarray) -> Parts:
    numbers = blocks[:, 2:34] | (_bits(blocks[:, 66:74], 2).astype(np.uint16) << 8)
    return _signed(codebook("IQ2_S")[numbers], blocks[:, 34:66]), _quarter_scales(blocks, blocks[:, 74:])


def _iq3_xxs(blocks: np.ndarray) -> Parts:
    words = _view(blocks[:, 66:], np.uint32)
    scale = _half(blocks) * (np.float32(0.5) + _floats(words >> 28)) * np.float32(0.5)
    return _signed(codebook("IQ3_XXS")[blocks[:, 2:66]], _packed_signs(words)), scale


def _iq3_s(blocks: np.ndarray) -> Parts:
    numbers = blocks[:, 2:66] | (_bits(blocks[:, 66:74], 1).astype(np.uint16) << 8)
    scale = _half(blocks) * (2 * _floats(_bits(blocks[:, 106:], 4)) + 1)
    return _signed(codebook("IQ3_S")[numbers], blocks[:, 74:106]), scale


def _iq1_s(blocks: np.ndarray) -> Parts:
    words = _view(blocks[:, 34:], np.uint16)  # for 32 values: 3 bits of each number, 3 of the scale, one of the shift
    high = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7
    numbers = blocks[:, 2:34] | (high.reshape(len(blocks), -1) << 8)
    shift = np.repeat(1 - 2 * (words >> 15).astype(np.int8), 4, 1)
    values = codebook("IQ1_S")[numbers] + shift[..., None]
    return values.reshape(len(blocks), -1), _half(blocks) * _floats(2 * ((words >> 12) & 7) + 1) / np.float32(8)


def _iq1_m(blocks: np.ndarray) -> Parts:
    high, words = _bits(blocks[:, 32:48], 4), _view(blocks[:, 48:], np.uint16)
    numbers = blocks[:, :32] | ((high & 7).astype(np.uint16) << 8)
    values = codebook("IQ1_S")[numbers] + (1 - 2 * (high >> 3).astype(np.int8))[..., None]
    scale = _iq1_m_half(blocks).astype(np.float32)
    steps = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7  # 3 bits for each 16 values
    return values.reshape(len(blocks), -1), scale * _floats(2 * steps.reshape(len(blocks), -1) + 1) / np.float32(8)


def _iq1_m_half(blocks: np.ndarray) -> np.ndarray:
    """The block's float16: in the top 4 bits of four words, the lowest first."""
    top = (_view(blocks[:, 48:], np.uint16) >> 12) << np.array([0, 4, 8, 12], np.uint16)
    return np.bitwise_or.reduce(top, axis=1, keepdims=True).view(np.float16)


def _nvfp4(blocks: np.ndarray) -> Parts:
    quants = blocks[:, 4:].reshape(-1, 4, 1, 8) >> np.array([0, 4], np.uint8)[:, None] & 15  # of each 16, eights
    values = np.array(FP4, np.int8)[quants] - np.int8(FP4[0])  # twice the floats of 4 bits
    exponent, fraction = (blocks[:, :4] >> 3 & 15).astype(np.int32), _floats(blocks[:, :4] & 7)
    scale = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(1 + fraction / 8, exponent - 7))  # E4M3, no sign
    scale[blocks[:, :4] == 127] = 0
    return values.reshape(len(blocks), -1), (scale / 2).astype(np.float32)


_KINDS: Mapping[str, Callable[[np.ndarray], Parts]] = MappingProxyType(
    {
        "IQ1_S": _iq1_s,
        "IQ1_M": _iq1_m,
        "IQ2_XXS": _iq2_xxs,
        "IQ2_XS": _iq2_xs,
        "IQ2_S": _iq2_s,
        "IQ3_XXS": _iq3_xxs,
        "IQ3_S": _iq3_s,
        "NVFP4": _nvfp4,
    }
)
CODEBOOK_KINDS = tuple(_KINDS)
# Of kinds whose scales are integers times the block's float16 times a power of two: that power.
EXPONENTS: Mapping[str, int] = MappingProxyType(
    {**dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"), -3), "IQ3_XXS": -2, "IQ3_S": 0}
)


def _half(blocks: np.ndarray) -> np.ndarray:
    return _view(blocks[:, :2], np.float16).astype(np.float32)


def _view(raw: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    return np.ascontiguousarray(raw).view(dtype)


def _floats(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


def _bits(raw: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of a few bits, the lowest of a byte first, `[B, N·8/bits]`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((raw[..., None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(raw), -1)


def _quarter_scales(blocks: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Scales of 4 bits, each for 16 values."""
    return _half(blocks) * (np.float32(0.5) + _floats(_bits(steps, 4))) * np.float32(0.25)


def _packed_signs(words: np.ndarray) -> np.ndarray:
    """The signs of 32 values: four times 7 bits in a word."""
    return _even(((words[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & 127).reshape(len(words), -1))


def _even(signs: np.ndarray) -> np.ndarray:
    """Seven signs as eight: the last makes the number of negative ones even."""
    parity = signs ^ (signs >> 4)
    parity ^= parity >> 2
    return (signs | (((parity ^ (parity >> 1)) & 1) << 7)).astype(np.uint8)


def _signed(values: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Values [B, N, 4 or 8] with the signs [B, 32], a byte for eight."""
    negative = np.unpackbits(signs, axis=1, bitorder="little").astype(np.int8)
    return values.reshape(len(values), -1) * (1 - 2 * negative)
