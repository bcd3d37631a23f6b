//! The front end of the Split-C compiler: any text, and text made of the pieces of which programs are made.
#![no_main]

use libfuzzer_sys::fuzz_target;

/// What a program begins with.
const HEAD: &str = "typedef struct { unsigned long quipu_bits; } quipu_gp;
typedef struct { unsigned long quipu_bits; } quipu_sp;
struct s { int a; struct s *global next; double list[4]; };
int *global g; int *spread sp; int A[4]::; int B[2][4]::[3][5]; struct s *global gs; int x; int *l;
void f(int n, int C[n]::[n]) {
";

const PIECES: [&str; 96] = [
    "x", "g", "sp", "A", "B", "gs", "l", "n", "C", "f", "1", "0", "2.5", "'c'", "\"s\"", "=", ":=", ":-", "+=", "+",
    "-", "*", "&", "!", "~", "/", "%", "<", ">", "==", "!=", "&&", "||", "?", ":", ",", ";", "(", ")", "[", "]", "{",
    "}", ".", "->", "++", "--", "::", "a", "next", "list", "int", "double", "struct s", "struct", "*global", "*spread",
    "void", "char", "static", "register", "extern", "typedef", "const", "volatile", "if", "else", "while", "for", "do",
    "switch", "case", "default", "break", "return", "goto", "sizeof", "tolocal", "toglobal", "toproc", "tospread",
    "atomic", "enum", "union", "__attribute__", "__extension__", "typeof", "...", "unsigned", "\n", "# 7 \"y.h\" 3\n",
    "quipu_gp", "<<=", "({", "})", "label:",
];

fuzz_target!(|input: &[u8]| {
    let Some((mode, bytes)) = input.split_first() else { return };
    let text = match mode & 3 {
        0 => String::from_utf8_lossy(bytes).into_owned(),
        kind => {
            let pieces: Vec<&str> =
                bytes.iter().map(|byte| PIECES[usize::from(*byte) % PIECES.len()]).collect();
            let body = pieces.join(" ");
            if kind == 1 { body } else { format!("{HEAD}{body}\n}}\n") }
        }
    };
    let _ = quipu_splitc::join_strings(&text);
    // A translation that succeeds is text that is translated to itself but for what was Split-C.
    if let Ok(made) = quipu_splitc::translate(&text, mode & 4 != 0) {
        assert!(made.len() <= text.len() * 400 + 4096, "the translation is far too long");
    }
});
