//! What the translator refuses, what it leaves alone, and what it makes of single constructs. That programs
//! do
//! what they should is tested with the run-time library (`abi/splitc`).

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use quipu_splitc::{driver, translate};

#[path = "../../../abi/types/testing/needs.rs"]
#[allow(dead_code)]
mod needs;

/// What the header declares, as far as these tests need it.
const HEAD: &str = "typedef struct { unsigned long quipu_bits; } quipu_gp;
typedef struct { unsigned long quipu_bits; } quipu_sp;
int printf(const char *, ...);
void bulk_read(void *to, void *global from, int size);
struct s { int a; int bits : 3; struct s *global next; int list[4]; };
int *global g; int *spread sp; int A[4]::; int B[2][4]::[3][5]; struct s *global gs;
int x; int *l; double d;
";

fn body(text: &str) -> Result<String, quipu_splitc::Error> {
    made(text, false)
}

fn made(text: &str, optimize: bool) -> Result<String, quipu_splitc::Error> {
    let text = format!("# 1 \"head.h\"\n{HEAD}# 10 \"user.sc\"\nvoid f(void)\n{{\n{text}\n}}\n");
    translate(&text, optimize)
}

#[test]
fn what_cannot_be_translated_is_refused_with_its_line() {
    for (text, why) in [
        ("x = gs->bits;", "'bits' is a bit-field"),
        ("l = g;", "use tolocal or a cast"),
        ("g = x;", "a number is no global pointer"),
        ("sp = g;", "only a spread pointer"),
        ("x = (long)g;", "cannot be cast to a number"),
        ("x = sizeof A;", "a spread array has no size"),
        ("&A;", "the address of a whole spread array"),
        ("A = sp;", "a spread array cannot be assigned to"),
        ("A++;", "a spread array cannot be changed"),
        ("x = B + 1;", "of several dimensions"),
        ("x := d; d := g[0];", "both sides of a get have the same type"),
        ("g * 2;", "'*' takes no global pointer"),
        ("g + g;", "two pointers cannot be added"),
        ("-g;", "'-' takes no pointer"),
        ("*g *= g;", "takes no pointer on its right"),
        ("gs->list = 0;", "an array cannot be assigned to"),
        ("static int C[4]::;", "stands outside of functions"),
        ("int C[4]:: = {1};", "a spread array has no initialiser"),
        ("int C[4]::[2]::;", "'::' stands once"),
        ("typedef int t[4]::;", "a typedef cannot name a spread array"),
        ("struct { int C[4]::; } s;", "a spread array cannot be a member"),
        ("x = nothing;", "'nothing' is not declared"),
        ("gs->absent = 1;", "no member 'absent'"),
        ("atomic(x, g);", "is a function"),
        ("atomic(f, l);", "is a global pointer"),
        ("tolocal(x);", "takes a pointer"),
        ("toglobal(g);", "wrong number of arguments"),
        ("void *global v = g; x = *v;", "has to be cast"),
        ("x = g ?: 0;", "without a middle operand"),
        ("if (x) { x = 1;", "'}' is missing"),
        ("x = (1 + ;", "expected an expression"),
        ("\"abc", "has no end"),
    ] {
        let error = body(text).expect_err(text);
        assert!(error.message.contains(why), "{text}: {error}");
        assert_eq!(error.file, "user.sc", "{text}");
        assert!((12..=14).contains(&error.line), "{text}: {error}");
    }
    // The nesting is bounded, in every direction.
    for deep in ["(", "{", "-", "if (x) ", "*", "a[", "f(", "1 ? "] {
        assert!(body(&deep.repeat(100_000)).is_err(), "{deep}");
    }
    let declarators = format!("int {}x;", "(*".repeat(100_000));
    assert!(body(&declarators).is_err());
}

#[test]
fn single_constructs_become_c() {
    for (text, c) in [
        ("x = 1 + 2;", "x = 1 + 2;"),
        ("x = x ? x :-1;", "x = x ? x :-1;"),
        ("g = l;", "g = quipu_gp_here(l);"),
        ("g = sp;", "g = quipu_gp_of_sp(sp);"),
        ("g = 0;", "g = ((quipu_gp){0});"),
        ("l = (int *)g;", "l = ((int *)quipu_gp_local(g));"),
        ("g++;", "quipu_gp_post(&(g), (1L) * (long)sizeof(int));"),
        ("sp += 3;", "quipu_sp_pre(&(sp), (long)(3), sizeof(int));"),
        ("if (g) ;", "if (quipu_gp_true(g)) ;"),
        ("x = sp - sp;", "x = quipu_sp_diff(sp, sp, sizeof(int));"),
        ("x = g != l;", "x = (!quipu_gp_equal(g, quipu_gp_here(l)));"),
        ("x = sizeof *g;", "x = sizeof(int);"),
        (
            "g = &gs->list[2];",
            "quipu_gp_add(quipu_gp_add(gs, __builtin_offsetof(struct s, list)), (long)(2) * (long)sizeof(int));",
        ),
        ("x := *g;", "quipu_sc_get(&(x), g, sizeof(int));"),
        ("g[1] :- x;", "quipu_sc_store("),
        ("A[2] := 5;", "quipu_sc_put("),
        ("bulk_read(l, g, 4);", "bulk_read(l, g, 4);"),
        ("bulk_read(l, &x, 4);", "bulk_read(l, quipu_gp_here(&x), 4);"),
        (
            "l = tolocal(sp[2]);",
            "l = ((int *)quipu_gp_local(quipu_gp_of_sp(quipu_sp_add(sp, (long)(2), sizeof(int)))));",
        ),
        ("sp = &A[1];", "sp = quipu_sp_add(A, (long)(1), sizeof(int));"),
        (
            "x = toproc(B[1][2]);",
            "x = quipu_gp_proc(quipu_gp_of_sp(quipu_sp_add(quipu_sp_add(B, (long)(1) * (long)(4), sizeof(int [3][5])), (long)(2), sizeof(int [3][5]))));",
        ),
    ] {
        let made = body(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert!(made.contains(c), "{text}:\n{made}");
    }
}

/// With -O reads of one operation are under way together; not where anything in between could tell.
#[test]
fn independent_reads_overlap() {
    let gets =
        |text: &str, optimize| made(text, optimize).unwrap().matches("quipu_sc_get(").count();
    for (text, count) in [
        ("x = *g + g[1];", 2),
        ("x = (*g + g[1]) * A[x] - gs->a;", 4),
        ("x = *g;", 0),
        ("x = *g + x;", 0),
        ("x = g[*g] + 1;", 0),
        ("x = *g + g[x++];", 0),
        ("x = *g + printf(\"\") + g[1];", 0),
        ("x = *g && g[1];", 0),
        ("x = *g ? g[1] : g[2];", 0),
        ("x = g[x = 1] + *g;", 0),
    ] {
        assert_eq!(gets(text, true), count, "{text}");
        assert_eq!(gets(text, false), 0, "{text}");
    }
}

/// Text without Split-C in it comes out as it went in, whatever C there is in it.
#[test]
fn plain_c_is_copied() {
    let text = "int f(a, b) int a; char *b; { return a + *b; }
struct t { int a : 2, : 3; union { int i; float f; }; } v = { .i = 1 }, *w[2] = { &v };
static inline int (*h(void))(int, int (*)[3]) { return 0; }
typedef unsigned long size; size k(size x, ...) { size size = x; size++; return size; }
enum e { P, Q = 3, R }; int arr[] = { [1] = 2, [3 ... 5] = 4 }; char *s = \"a\" \"b\";
int m(int n) { int v[n][n + 1]; lab: for (;;) { if (n) goto lab; else break; }
  return sizeof v / sizeof(int[3]); }
int o(void) { return ({ int y = 1; y; }) + __builtin_offsetof(struct t, i) + (int){ 3 }
  + _Alignof(int); }
__attribute__((noinline)) int q(int x) { __asm__ volatile(\"nop\" : : \"r\"(x));
  switch (x) { case 1 ... 2: default: ; } return x; }
int *volatile const z; _Static_assert(1, \"one\"); extern int u __asm__(\"v\"); __typeof__(u) uu; void none();
";
    assert_eq!(translate(text, false).unwrap(), text);
}

/// Headers of the system are understood, not skipped: few programs include this many.
#[test]
fn headers_of_the_system_are_parsed() {
    if needs::compiler().is_none() {
        return;
    }
    let names = "assert complex ctype errno fcntl float inttypes iso646 limits locale math netdb \
                 poll pthread regex sched semaphore setjmp signal stdarg stdbool \
                 stddef stdint stdio stdlib \
                 string strings tgmath time unistd wchar wctype sys/mman sys/socket sys/stat sys/time sys/types sys/wait";
    for standard in ["-std=gnu99", "-std=gnu89", "-std=gnu17"] {
        let text: String =
            names.split_whitespace().map(|name| format!("#include <{name}.h>\n")).collect();
        let folder = std::env::temp_dir().join(format!("quipu-headers-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("all.c");
        fs::write(&file, text).unwrap();
        let output =
            Command::new("cc").args(["-E", standard]).arg(&file).stderr(Stdio::inherit()).output();
        let text = String::from_utf8(output.unwrap().stdout).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        // As if they were the user's own: nothing is skipped.
        let own: String = text
            .lines()
            .map(|line| {
                if line.starts_with("# ") {
                    line.trim_end_matches([' ', '1', '2', '3', '4']).to_owned() + "\n"
                } else {
                    format!("{line}\n")
                }
            })
            .collect();
        let made = translate(&own, false).unwrap_or_else(|error| panic!("{standard}: {error}"));
        assert!(made.len() >= own.len());
    }
}

/// Errors of the C compiler name the user's line, too.
#[test]
fn the_compiler_names_the_users_lines() {
    let Some(_) = needs::compiler() else { return };
    let folder = std::env::temp_dir().join(format!("quipu-lines-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("lines.sc");
    let text = "#include <stdio.h>\nint A[PROCS]::;\nint\nf(p,\n  n)\nint *global p;\nint n;\n{\n  int *global q =\n  p,\n  *r;\n\
                printf(\"a\nb\", *p\n + A[1]);\n  return n\n   @ 2;\n}\n";
    let at = |line: u32, replaced: &str| {
        let text: Vec<String> = text
            .lines()
            .enumerate()
            .map(
                |(number, old)| {
                    if number as u32 + 1 == line { replaced.into() } else { old.into() }
                },
            )
            .collect();
        fs::write(&file, text.join("\n").replace("@", "+") + "\n").unwrap();
        compile_errors(&file)
    };
    for (line, replaced) in
        [(15, "  return n + undeclared(;"), (11, "  *r; x y;"), (14, "+ *p->a);")]
    {
        let errors = at(line, replaced);
        assert!(errors.contains(&format!("lines.sc:{line}:")), "line {line}: {errors}");
    }
    fs::write(&file, text.replace("return n\n   @ 2", "double *z = n;\n  return z + 1.5")).unwrap();
    let errors = compile_errors(&file);
    assert!(errors.contains("lines.sc:16:"), "{errors}");
    fs::remove_dir_all(&folder).unwrap();
}

/// Runs the driver in a process of its own, for what it writes to standard error.
fn compile_errors(file: &Path) -> String {
    const FILE: &str = "SPLITC_TEST_FILE";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "compile_one", "--nocapture"]).env(FILE, file);
    let output = command.output().unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[test]
fn compile_one() {
    let Some(file) = std::env::var_os("SPLITC_TEST_FILE") else { return };
    let object = PathBuf::from(&file).with_extension("o");
    let words = [OsString::from("-c"), file, "-o".into(), object.into()];
    if let Err(error) = driver::run(&words, Path::new("/nowhere")) {
        println!("{error}");
    }
}
