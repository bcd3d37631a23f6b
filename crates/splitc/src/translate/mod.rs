//! The translator: parses preprocessed Split-C and writes C.
//!
//! There is no tree of the program. Each part is parsed, typed and written in one pass. What has nothing of
//! Split-C in it is copied as it stands, line markers included, so that the lines of the C text are those of
//! the user. What is written anew stands on the same line, or has a marker after it.
//!
//! | module | handles |
//! |---|---|
//! | `decl` | declarations, specifiers, structures |
//! | `declarator` | declarators and parameters |
//! | `init` | initialisers |
//! | `stmt` | statements and functions |
//! | `expr` | expressions: parsing and types |
//! | `access` | reads, writes, gets, puts, stores |
//! | `pointer` | arithmetic, comparison and conversion of pointers |
//! | `call` | calls, and those that the language knows |

mod access;
mod call;
mod decl;
mod declarator;
mod expr;
mod init;
mod pointer;
mod stmt;

use std::collections::HashMap;

use crate::error::Error;
use crate::lex::{Kind, Token, Tokens, lex};
use crate::types::{Struct, Ty, declare};

/// Deepest nesting of a program.
const MAX_DEPTH: u32 = 300;
/// Bytes of the stack that this takes, and many more.
const STACK: usize = 64 << 20;

/// What a name means.
#[derive(Clone, Debug)]
enum Symbol {
    Type(Ty),
    /// A variable, function or enumerator.
    Value(Ty),
}

type Res<T> = Result<T, Error>;

/// An expression.
#[derive(Clone, Debug)]
struct Expr {
    /// Tokens: from the first to before the last.
    first: usize,
    end: usize,
    ty: Ty,
    /// The C text, if it is not that of the tokens.
    text: Option<String>,
    place: Place,
    /// What has to be read before the text can be evaluated.
    reads: Vec<Read>,
}

/// A read of remote memory into a variable.
#[derive(Clone, Debug)]
struct Read {
    /// The C text that declares the variable, and its name.
    variable: String,
    name: String,
    addr: String,
}

/// Where the value of an expression is.
#[derive(Clone, Debug)]
enum Place {
    /// The text is an expression of C.
    Here,
    /// In the memory of some process.
    Remote {
        /// Its address, a global pointer.
        addr: String,
        /// The spread pointer that `&` makes of it.
        spread: Option<String>,
    },
}

pub(crate) struct Parser<'a> {
    src: &'a str,
    tokens: Tokens,
    at: usize,
    scopes: Vec<HashMap<String, Symbol>>,
    tags: Vec<HashMap<String, usize>>,
    structs: Vec<Struct>,
    /// What the function at hand returns.
    ret: Option<Ty>,
    /// Number of the next name that is made up.
    fresh: u32,
    depth: u32,
    /// Whether `:=` and `:-` are operators here, and no conditional is open.
    colon_operators: bool,
    /// C text that follows the external declaration at hand.
    after: String,
    /// Whether reads of one expression may be under way at the same time.
    optimize: bool,
}

/// Translates preprocessed Split-C to C. `optimize`: the operands of an arithmetic operation that are read
/// from
/// remote memory, and have no side effects, are read at the same time.
///
/// # Errors
/// The first thing that cannot be translated, with file and line.
pub fn translate(src: &str, optimize: bool) -> Result<String, Error> {
    // The parser calls itself for what is nested, and callers may have small stacks.
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK);
        let translated = thread.spawn_scoped(scope, || translate_here(src, optimize));
        let no_thread = |why: std::io::Error| Error::at("<input>", 1, format!("no thread: {why}"));
        translated
            .map_err(no_thread)?
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn translate_here(src: &str, optimize: bool) -> Result<String, Error> {
    let src = &without_register(src, &lex(src)?);
    let mut parser = Parser {
        src,
        tokens: lex(src)?,
        at: 0,
        scopes: vec![HashMap::new()],
        tags: vec![HashMap::new()],
        structs: Vec::new(),
        ret: None,
        fresh: 0,
        depth: 0,
        colon_operators: true,
        after: String::new(),
        optimize,
    };
    parser.define("__builtin_va_list", Symbol::Type(Ty::Unknown));
    parser.unit()
}

/// Whether two texts differ in white space and line markers only.
fn is_same(a: &str, b: &str) -> bool {
    fn visible(text: &str) -> impl Iterator<Item = u8> + '_ {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.flat_map(str::bytes).filter(|byte| !byte.is_ascii_whitespace())
    }
    visible(a).eq(visible(b))
}

/// Takes `register` out of the user's declarations: variables that are the targets of gets have addresses.
fn without_register(src: &str, tokens: &Tokens) -> String {
    let mut out = String::with_capacity(src.len());
    let mut copied = 0;
    for pair in tokens.list.windows(3) {
        let [token, next, after] = pair else { continue };
        let text = |token: &Token| &src[token.start..token.end];
        if token.kind != Kind::Name || token.system || text(token) != "register" {
            continue;
        }
        // `register i;` and `register *p;` say no type, which is int then.
        let is_name = next.kind == Kind::Name;
        let implicit = match text(next) {
            "*" | "(" => true,
            _ => is_name && [";", ",", "=", ")", "["].contains(&text(after)),
        };
        out.push_str(&src[copied..token.start]);
        out.push_str(if implicit { "int     " } else { "        " });
        copied = token.end;
    }
    out.push_str(&src[copied..]);
    out
}

impl Parser<'_> {
    /// All external declarations.
    fn unit(&mut self) -> Res<String> {
        let mut out = String::new();
        let mut copied = 0;
        while self.token().kind != Kind::End {
            let first = self.at;
            out.push_str(&self.src[copied..self.token().start]);
            let system = self.token().system;
            match self.external() {
                Ok(text) => {
                    let plain = &self.src[self.tokens.list[first].start..self.previous_end()];
                    out.push_str(if is_same(&text, plain) { plain } else { &text });
                }
                // Headers of the system may contain anything that cc understands; programs do not need it
                // to be understood here.
                Err(_) if system => {
                    self.recover(first);
                    let (from, to) = (self.tokens.list[first].start, self.previous_end());
                    out.push_str(&self.src[from..to]);
                }
                Err(error) => return Err(error),
            }
            copied = self.previous_end();
            if !self.after.is_empty() {
                let after = std::mem::take(&mut self.after);
                out.push_str(&after);
                out.push_str(&self.marker());
            }
        }
        out.push_str(&self.src[copied..]);
        Ok(out)
    }

    /// Skips an external declaration.
    fn recover(&mut self, first: usize) {
        self.at = first;
        self.scopes.truncate(1);
        self.tags.truncate(1);
        (self.ret, self.depth, self.colon_operators) = (None, 0, true);
        self.after.clear();
        let mut depth = 0;
        while self.token().kind != Kind::End {
            let text = self.text_of(self.at);
            let closes_body = text == "}" && depth == 1;
            match text {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth -= 1,
                _ => {}
            }
            let ends = text == ";" && depth <= 0;
            self.at += 1;
            let goes_on =
                [";", ",", "=", "__attribute__", "__asm__"].iter().any(|word| self.is(word));
            let named = self.token().kind == Kind::Name || self.is("*");
            let begins = self.starts_declaration() || !named;
            if ends || (closes_body && !goes_on && begins) {
                return;
            }
        }
    }

    /// This token; the last one, if there are no more.
    fn token(&self) -> Token {
        self.tokens.list[self.at.min(self.tokens.list.len() - 1)]
    }

    fn peek(&self, ahead: usize) -> &str {
        self.text_of((self.at + ahead).min(self.tokens.list.len() - 1))
    }

    fn text_of(&self, index: usize) -> &str {
        let token = &self.tokens.list[index.min(self.tokens.list.len() - 1)];
        &self.src[token.start..token.end]
    }

    /// The end of the token before this one.
    fn previous_end(&self) -> usize {
        let before = self.at.min(self.tokens.list.len()).checked_sub(1);
        before.map_or(0, |before| self.tokens.list[before].end)
    }

    /// The text between two tokens' beginnings, without what follows the last one.
    fn slice(&self, first: usize, end: usize) -> &str {
        if first >= end {
            return "";
        }
        let last = end.min(self.tokens.list.len()) - 1;
        &self.src[self.tokens.list[first.min(last)].start..self.tokens.list[last].end]
    }

    fn is(&self, text: &str) -> bool {
        let token = self.token();
        !matches!(token.kind, Kind::Text | Kind::Char) && &self.src[token.start..token.end] == text
    }

    fn is_any(&self, texts: &[&str]) -> bool {
        texts.iter().any(|text| self.is(text))
    }

    fn accept(&mut self, text: &str) -> bool {
        let found = self.is(text);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, text: &str) -> Res<()> {
        if self.accept(text) {
            return Ok(());
        }
        let found = self.text_of(self.at);
        let found = if found.is_empty() { "the end of the file" } else { found };
        let message = format!("expected '{text}' before '{}'", found.lines().next().unwrap_or(""));
        Err(self.error(message))
    }

    /// An error at this token.
    fn error(&self, message: impl Into<String>) -> Error {
        self.error_at(self.at, message)
    }

    fn error_at(&self, index: usize, message: impl Into<String>) -> Error {
        let token = &self.tokens.list[index.min(self.tokens.list.len() - 1)];
        Error::at(&self.tokens.files[token.file as usize], token.line, message)
    }

    /// A line marker for this token, on a line of its own.
    fn marker(&self) -> String {
        let token = self.token();
        let flags = if token.system { " 3" } else { "" };
        format!("\n# {} \"{}\"{flags}\n", token.line, self.tokens.files[token.file as usize])
    }

    fn fresh(&mut self, what: &str) -> String {
        self.fresh += 1;
        format!("quipu_{what}{}", self.fresh)
    }

    fn lookup(&self, name: &str) -> Option<&Symbol> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name))
    }

    fn define(&mut self, name: &str, symbol: Symbol) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name.into(), symbol);
        }
    }

    fn declare(&self, ty: &Ty, name: &str) -> String {
        declare(&self.structs, ty, name)
    }

    /// Enters a level of nesting; the caller leaves it.
    fn enter(&mut self) -> Res<()> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.error("the program is nested too deeply here"));
        }
        Ok(())
    }

    /// The index after the bracket that closes the one at `self.at`.
    fn skip_brackets(&mut self) -> Res<()> {
        let first = self.at;
        let mut depth = 0u32;
        if !self.is_any(&["(", "[", "{"]) {
            return Err(self.error("expected a bracket"));
        }
        loop {
            if self.token().kind == Kind::End {
                return Err(self.error_at(first, "this bracket is not closed"));
            }
            if self.is_any(&["(", "[", "{"]) {
                depth += 1;
            } else if self.is_any(&[")", "]", "}"]) {
                depth -= 1;
            }
            self.at += 1;
            if depth == 0 {
                return Ok(());
            }
        }
    }

    /// The C text of tokens in which some parts have other text.
    fn compose(&self, first: usize, end: usize, parts: &[&Expr]) -> Option<String> {
        if parts.iter().all(|part| part.text.is_none()) {
            return None;
        }
        let mut out = String::new();
        let mut at = self.tokens.list[first].start;
        for part in parts {
            let (from, to) =
                (self.tokens.list[part.first].start, self.tokens.list[part.end - 1].end);
            out.push_str(&self.src[at..from]);
            out.push_str(&self.text(part));
            at = to;
        }
        out.push_str(&self.src[at..self.tokens.list[end - 1].end]);
        Some(out)
    }

    /// The C text of an expression.
    fn text(&self, expr: &Expr) -> String {
        let inner = self.inner(expr);
        let declare =
            || expr.reads.iter().map(|read| format!("{}; ", read.variable)).collect::<String>();
        match &expr.reads[..] {
            [] => inner,
            [Read { name, addr, .. }] => {
                format!(
                    "({{ {}quipu_sc_read(&{name}, {addr}, sizeof {name}); {inner}; }})",
                    declare()
                )
            }
            reads => {
                let get = |Read { name, addr, .. }: &Read| {
                    format!("quipu_sc_get(&{name}, {addr}, sizeof {name}); ")
                };
                let gets: String = reads.iter().map(get).collect();
                format!("({{ {}{gets}quipu_sc_sync(); {inner}; }})", declare())
            }
        }
    }

    /// The C text of an expression whose reads are done.
    fn inner(&self, expr: &Expr) -> String {
        match &expr.text {
            Some(text) => text.clone(),
            None => self.slice(expr.first, expr.end).into(),
        }
    }
}
