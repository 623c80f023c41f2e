"""Texts on which tokenizers tend to disagree, by kind; more than 300."""

# ruff: noqa: RUF001  # ambiguous characters are what this is about

from __future__ import annotations

import random
import unicodedata


def listed(block: str) -> list[str]:
    """The texts between the bars and line ends of a block."""
    return [text.replace("\\n", "\n") for text in block.strip("\n").replace("\n", "¦").split("¦")]


CODE = r"""
def fib(n): return n if n < 2 else fib(n-1) + fib(n-2)
    if (x != y && !done) { *p++ = arr[i][j] | 0xFF; }
#include <stdio.h>
int main(void) { printf("%d\n", 42); return 0; }
SELECT * FROM users WHERE id=1; -- comment
a->b::c<T>(d) => e?.f ?? g;
for(let i=0;i<10;i++){console.log(`${i}`)}
x = [1,2,3][::-1]; y = {**a, 'k': "v"}
<div class="a b" id='c'>&nbsp;&lt;</div>
https://example.com/path?q=1&r=2#frag
user.name+tag@mail.example.org
$HOME/.config/app_v1.2.3-rc.4/file.tar.gz
C:\Users\me\Desktop\new file.txt
git commit -m "fix: it's broken" --amend
λx.λy.x⊕y ∀ε>0 ∃δ
snake_case camelCase PascalCase SCREAMING_CASE kebab-case
!= == === <= >= << >> && || ?? :: -> => ... .. ,
(((((nested)))))[[[[]]]]{{{{}}}}
"quoted" 'single' “curly” ‘curly’ «guillemets» „low“
/* block */ // line
\n\t\r\\ \u0041 \x41
0b1010 0o777 0xDEADBEEF 1e-10 1_000_000 3.14f
@decorator #hash $dollar %percent ^caret &amp *star
-----BEGIN KEY-----
==========
__init__ __name__
~~~~ ```python
a+b-c*d/e%f
""".strip("\n").split("\n")

WORDS = listed(r"""
Hello¦Hello world¦Hello, world! How are you?¦ Hello¦ leading space¦trailing space ¦don't¦DON'T
I'LL I'll i'Ll¦we've WE'VE¦they're THEY'RE¦I'd I'D¦it's IT'S 's 'S¦'tis 'twas¦rock'n'roll¦o'clock
'S 'LL 'Re 'vE 'M 'D 'T¦''s'''t¦Straße¦Straße Strasse¦The quick brown fox jumps over the lazy dog.
a b c d e f¦aAbBcC¦ALLCAPS lower MiXeD¦e.g. i.e. etc.¦Mr. Smith's U.S.A.¦100% of $5.00¦foo_bar
foo-bar¦foo/bar¦foo\bar¦a.b.c¦....¦…¦—¦–¦?!?!¦user¦assistant¦x¦.¦'¦"¦-¦ '¦ "¦ .¦'s¦s'¦'ſ 'K¦don’t
I’ll
""")

DIGITS = listed(r"""
0¦7¦12¦123¦1234¦12345¦123456¦1234567890¦3.14159¦1,000,000¦2024-01-31T12:34:56Z¦+1 (555) 010-9999
1st 2nd 3rd¦a1b2c3¦1a2b¦v1.2.3¦٣٤٥¦१२३४¦๑๒๓¦½ ¾ ²³ ₁₂¦Ⅷ ⅷ¦①②③¦１２３４¦0000000000000000
9 9 9 99  999¦007¦1 000 000¦x² y₂
""")

BLANKS = [
    " ", "  ", "   ", "\n", "\n\n", "\n\n\n", "\t", "\t\t", "\r\n", "\r\n\r\n", " \n", "\n ", "  \n  \n",
    "a  b", "a   b", "a\nb", "a\n\nb", "a \n b", "a\n\n\nb", "a\n    b\n        c", "\tif x:\n\t\treturn\n",
    "a\t b", "a \tb", "x  ", "x\n", "x \n ", "  x", "\n\nx", "a\u00a0b", "a\u00a0\u00a0b", "\u3000x\u3000\u3000y",
    "a\u2003b", "a\u2028b\u2029c", "a\u0085b", "a\u200bb", "a\u200db", "\ufeffx", "a\u202fb", " " * 16, " " * 33,
    "\n" * 12, "\t" * 9, " \t" * 5, "\r", "\r\r", "a\rb", "a\r\r\nb", "a\x0bb", "a\x0cb", "end.  Next", "!\n\n", "! \n",
    "1 \n2", "  1", " \n\r\n \t x", "a   \n   b", "...\n...", "x\u1680y",
]  # fmt: skip

SCRIPTS = listed(r"""
你好，世界！¦我喜欢吃苹果。¦中文English混合123¦這是繁體字¦「引号」『二重』¦日本語のテキスト
こんにちは世界¦カタカナ¦漢字かな交じり文¦ﾊﾝｶｸ¦안녕하세요 세계¦한국어 텍스트입니다¦สวัสดีชาวโลก
ภาษาไทยไม่มีช่องว่าง¦ก็ไม่รู้เหมือนกัน¦Привет, мир!¦Съешь же ещё этих мягких французских булок
Γειά σου Κόσμε¦שלום עולם¦مرحبا بالعالم¦اللُّغَةُ العَرَبِيَّةُ¦नमस्ते दुनिया¦ক্ষমা করবেন¦வணக்கம்
ଓଡ଼ିଆ¦မြန်မာ¦ខ្មែរ¦ລາວ¦አማርኛ¦ქართული¦Հայերեն¦Tiếng Việt có dấu¦Zażółć gęślą jaźń¦Příliš žluťoučký kůň
İstanbul ıI¦ǅ ǈ ǋ¦ﬁ ﬂ ﬀ¦𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙𝟚¦𐍈𐌰𐌿¦㐀㐁 𠀀𠀁¦ß ẞ ſ¦ʰʷ ˈa ː
""")

# Composed and decomposed.
ACCENTED = listed("café¦naïve¦Ångström¦résumé¦señor¦über¦œuvre¦ệ¦ộ¦ü̈¦ñandú¦Żółw¦ṩ¦Ǟ¦가각힣¦が¦ガ¦א֑¦é̂")
ACCENTS = [unicodedata.normalize("NFC", text) for text in (*ACCENTED, " ".join(ACCENTED))]
ACCENTS += [unicodedata.normalize("NFD", text) for text in ACCENTS]

EMOJI = listed(r"""
😀¦😀😀😀¦a😀b¦👍🏽¦👍🏻👍🏿¦👩‍👩‍👧‍👦¦🏳️‍🌈¦🏴‍☠️¦🇩🇪🇫🇷¦🇺🇸 🇯🇵¦❤️ ❤¦✈️¦☕️¦1️⃣2️⃣¦🧑🏾‍🚀¦🏴󠁧󠁢󠁥󠁮󠁧󠁿
🤷🏽‍♀️¦😀 text 😀¦!😀!¦🎉🎊\n¦© ® ™¦→ ← ⇒¦░▒▓█¦♠♣♥♦¦½℃№
""")

CONTROLS = [
    "\x00", "a\x00b", "\x01\x02\x03", "\x04-\x04--", "\x07bell", "\x1b[31mred\x1b[0m", "\x7f", "a\x7fb", "\x80\x9f",
    "\x1c\x1d\x1e\x1f", "\ufffd", "a\ufffd\ufffdb", "\ufffe\uffff", "\u200e\u200f\u202a", "\xad", "\ue000\uf8ff",
    "\U000e0001", "\U0010ffff", "\U0001f3ff", "\ufe0f", "\u0301", " \u0301a", "\x06\x16\x13",
]  # fmt: skip

SPECIALS = listed(r"""
<s>hello¦</s> hello¦<s> hello</s>¦hello<s>¦<s><s>x¦a <s> b </s> c¦<unk>¦<unk> x¦<|im_start|>user\nHi<|im_end|>\n
<|endoftext|>¦x<|endoftext|>y¦<|im_end|><|im_end|>¦<|im_start|>¦<|im_ end|>¦<|im_end||¦ <|im_end|> ¦<|IM_END|>
<tool_call>{"name": "f"}</tool_call>¦x <tool_call> y¦<tool> <tool_response>¦<tool_call><tool¦a [UNUSED1] b
[UNUSED1]¦a\n\n\nb¦a\n\n\n\n\nb¦a      b¦a             b¦<0x41>¦<0x0A> x¦▁¦a▁b¦▁▁▁¦[PAD151700]¦<|file_sep|>
<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>¦<|repo_name|>x¦<reponame>x<filename>¦<|eot_id|>¦[INST] hi [/INST]
<｜end▁of▁sentence｜>¦<<SYS>>¦<s¦s>¦</s¦/s>¦<unk¦unk>
""")


def mixed(count: int) -> list[str]:
    """Texts put together at random, the same in each run, from characters that Unicode 14 has."""
    rng = random.Random(20)
    ascii_letters = [chr(code) for code in range(32, 127)]
    rare = [chr(code) for code in range(0x80, 0x1FFFF, 97) if unicodedata.category(chr(code)) not in ("Cn", "Cs")]
    pieces = [*WORDS, *DIGITS, *BLANKS, *EMOJI, *SPECIALS, "'ll", "'S", " \n", "\n\n", "  "]
    pools = (ascii_letters, ascii_letters, " \n\t'", "0123456789", rare, pieces)
    return ["".join(rng.choice(rng.choice(pools)) for _ in range(rng.randrange(1, 30))) for _ in range(count)]


TEXTS = ["", *CODE, "\n".join(CODE), *WORDS, *DIGITS, *BLANKS, *SCRIPTS, *ACCENTS, *EMOJI, *CONTROLS, *SPECIALS]
TEXTS = list(dict.fromkeys([*TEXTS, *mixed(150)]))
