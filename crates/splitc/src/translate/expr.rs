//! Expressions: parsing and types.

mod place;

use std::rc::Rc;

use super::{Expr, Parser, Place, Res, Symbol};
use crate::lex::Kind;
use crate::types::{Func, Ty};

/// Binary operators, loosest first.
const LEVELS: [&[&str]; 10] = [
    &["||"],
    &["&&"],
    &["|"],
    &["^"],
    &["&"],
    &["==", "!="],
    &["<", ">", "<=", ">="],
    &["<<", ">>"],
    &["+", "-"],
    &["*", "/", "%"],
];
const ASSIGNMENTS: [&str; 11] = ["=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="];

impl Parser<'_> {
    pub(super) fn expr(&self, first: usize, ty: Ty, text: Option<String>) -> Expr {
        Expr { first, end: self.at, ty, text, place: Place::Here, reads: Vec::new() }
    }

    /// An expression with commas.
    pub(super) fn expression(&mut self) -> Res<Expr> {
        let first = self.at;
        let mut last = self.assignment()?;
        let mut parts = Vec::new();
        while self.is(",") {
            parts.push(self.value(last)?);
            self.at += 1;
            last = self.assignment()?;
        }
        if parts.is_empty() {
            return Ok(last);
        }
        let last = self.value(last)?;
        let ty = last.ty.clone();
        parts.push(last);
        let text = self.compose(first, self.at, &parts.iter().collect::<Vec<_>>());
        Ok(self.expr(first, ty, text))
    }

    /// An assignment, or what stands in its place.
    pub(super) fn assignment(&mut self) -> Res<Expr> {
        self.enter()?;
        let first = self.at;
        let left = self.conditional()?;
        let operator = self.text_of(self.at).to_owned();
        let result = if self.token().kind == Kind::Punct && ASSIGNMENTS.contains(&&operator[..]) {
            self.at += 1;
            let right = self.assignment()?;
            self.assign(first, left, &operator, right)
        } else if let Some(operator) = self.colon_operator() {
            self.at += 2;
            let right = self.assignment()?;
            self.split_phase(first, left, operator, right)
        } else {
            Ok(left)
        };
        self.depth -= 1;
        result
    }

    /// `:=` or `:-`, where one can stand.
    fn colon_operator(&self) -> Option<char> {
        if !self.is(":") || !self.colon_operators {
            return None;
        }
        let (colon, next) = (self.token(), self.tokens.list.get(self.at + 1)?);
        if next.start != colon.end {
            return None;
        }
        match self.peek(1) {
            "=" => Some('='),
            "-" => Some('-'),
            // `:--x` and `:-=` are nothing.
            _ => None,
        }
    }

    pub(super) fn conditional(&mut self) -> Res<Expr> {
        let first = self.at;
        let condition = self.binary(0)?;
        if !self.is("?") {
            return Ok(condition);
        }
        let condition = self.truth(condition)?;
        self.at += 1;
        if self.is(":") {
            // GNU: the condition is the value as well.
            if condition.ty.is_global() || condition.text.is_some() {
                return Err(self.error("'?:' without a middle operand cannot be translated here"));
            }
            self.at += 1;
            let other = self.conditional()?;
            let other = self.value(other)?;
            let text = self.compose(first, self.at, &[&condition, &other]);
            return Ok(self.expr(first, condition.ty, text));
        }
        let outer = std::mem::replace(&mut self.colon_operators, false);
        let yes = self.expression();
        self.colon_operators = outer;
        let yes = self.value(yes?)?;
        self.expect(":")?;
        let no = self.conditional()?;
        let no = self.value(no)?;
        let ty = match (yes.ty.is_global(), no.ty.is_global()) {
            (false, false) if yes.ty.target().is_none() => no.ty.clone(),
            (false, false) => yes.ty.clone(),
            _ => self.common(&yes, &no),
        };
        let (yes, no) = match ty.is_global() {
            true => (self.converted(yes, &ty)?, self.converted(no, &ty)?),
            false => (yes, no),
        };
        let text = self.compose(first, self.at, &[&condition, &yes, &no]);
        Ok(self.expr(first, ty, text))
    }

    /// Operators that bind at least as tightly as a level.
    fn binary(&mut self, loosest: usize) -> Res<Expr> {
        let first = self.at;
        let mut left = self.unary()?;
        loop {
            let Some((level, operator)) = self.binary_operator() else { return Ok(left) };
            if level < loosest {
                return Ok(left);
            }
            self.at += 1;
            let right = self.binary(level + 1)?;
            left = self.operate(first, left, operator, right)?;
        }
    }

    /// The binary operator at this token, and its level.
    fn binary_operator(&self) -> Option<(usize, &'static str)> {
        if self.token().kind != Kind::Punct {
            return None;
        }
        let text = self.text_of(self.at);
        let at_level = |operators: &&'static [&'static str]| {
            operators.iter().copied().find(|operator| *operator == text)
        };
        LEVELS.iter().enumerate().find_map(|(level, known)| Some((level, at_level(known)?)))
    }

    fn operate(&mut self, first: usize, left: Expr, operator: &str, right: Expr) -> Res<Expr> {
        if operator == "&&" || operator == "||" {
            let (left, right) = (self.truth(left)?, self.truth(right)?);
            let text = self.compose(first, self.at, &[&left, &right]);
            return Ok(self.expr(first, Ty::int(), text));
        }
        let (left, right) = (self.value(left)?, self.value(right)?);
        if left.ty.is_global() || right.ty.is_global() {
            return self.operate_pointers(first, left, operator, right);
        }
        let ty = match operator {
            "==" | "!=" | "<" | ">" | "<=" | ">=" => Ty::int(),
            "+" | "-" => match (left.ty.target(), right.ty.target()) {
                (Some(_), Some(_)) => Ty::arith("long"),
                (Some(to), None) => Ty::local_ptr(to.clone()),
                (None, Some(to)) => Ty::local_ptr(to.clone()),
                (None, None) => arithmetic(&left.ty, &right.ty),
            },
            _ => arithmetic(&left.ty, &right.ty),
        };
        if self.may_overlap(&left) && self.may_overlap(&right) {
            let text = format!("{} {operator} {}", self.inner(&left), self.inner(&right));
            let reads = [left.reads, right.reads].concat();
            return Ok(Expr { reads, ..self.expr(first, ty, Some(text)) });
        }
        let text = self.compose(first, self.at, &[&left, &right]);
        Ok(self.expr(first, ty, text))
    }

    /// Whether the reads of an operand may be under way together with those of another: it calls nothing and
    /// changes nothing, so that the order makes no difference.
    fn may_overlap(&self, expr: &Expr) -> bool {
        let changes = |index: usize| {
            let text = self.text_of(index);
            let is_call = text == "(" && index > expr.first && {
                let before = &self.tokens.list[index - 1];
                before.kind == Kind::Name && self.text_of(index - 1) != "sizeof"
                    || [")", "]"].contains(&self.text_of(index - 1))
            };
            is_call
                || ["=", "++", "--", "?", "&&", "||", ",", "{"].contains(&text)
                || text.len() > 1 && ASSIGNMENTS.contains(&text)
        };
        self.optimize && expr.ty.is_number() && !(expr.first..expr.end).any(changes)
    }

    pub(super) fn unary(&mut self) -> Res<Expr> {
        self.enter()?;
        let result = self.unary_inner();
        self.depth -= 1;
        result
    }

    fn unary_inner(&mut self) -> Res<Expr> {
        let first = self.at;
        let operator = self.text_of(self.at).to_owned();
        match (self.token().kind, &operator[..]) {
            (Kind::Punct, "++" | "--") => {
                self.at += 1;
                let operand = self.unary()?;
                self.step(first, operand, &operator, true)
            }
            (Kind::Punct, "*") => {
                self.at += 1;
                let operand = self.unary()?;
                self.dereference(first, operand)
            }
            (Kind::Punct, "&") => {
                self.at += 1;
                let operand = self.unary()?;
                self.address(first, operand)
            }
            (Kind::Punct, "&&") => {
                // GNU: the address of a label.
                self.at += 2;
                Ok(self.expr(first, Ty::local_ptr(Ty::Void), None))
            }
            (Kind::Punct, "!") => {
                self.at += 1;
                let operand = self.unary()?;
                let operand = self.truth(operand)?;
                let text = self.compose(first, self.at, &[&operand]);
                Ok(self.expr(first, Ty::int(), text))
            }
            (Kind::Punct, "+" | "-" | "~") | (Kind::Name, "__real__" | "__imag__") => {
                self.at += 1;
                let operand = self.unary()?;
                let operand = self.value(operand)?;
                if operand.ty.is_global() {
                    return Err(self.error_at(first, format!("'{operator}' takes no pointer")));
                }
                let text = self.compose(first, self.at, &[&operand]);
                Ok(self.expr(first, operand.ty, text))
            }
            (Kind::Name, "__extension__") => {
                self.at += 1;
                let operand = self.unary()?;
                let text = operand.text.clone();
                Ok(Expr {
                    first,
                    text: text.map(|text| format!("__extension__ {text}")),
                    ..operand
                })
            }
            (Kind::Name, "sizeof" | "_Alignof" | "__alignof__" | "__alignof") => {
                self.at += 1;
                self.size_of(first, &operator)
            }
            (Kind::Punct, "(") => self.parenthesis(),
            _ => self.postfix(),
        }
    }

    /// A cast, a compound literal, a statement expression, or an expression in parentheses.
    fn parenthesis(&mut self) -> Res<Expr> {
        let first = self.at;
        self.at += 1;
        if !self.starts_type() {
            self.at = first;
            return self.postfix();
        }
        let (ty, name) = self.type_name()?;
        self.expect(")")?;
        if self.is("{") {
            let init = self.initializer(&ty)?;
            let text = (ty.mentions_global() || init.text.is_some())
                .then(|| format!("({name}) {}", self.text(&init)));
            let literal = self.expr(first, ty, text);
            return self.suffixed(first, literal);
        }
        let operand = self.unary()?;
        self.cast(first, &ty, &name, operand)
    }

    fn size_of(&mut self, first: usize, operator: &str) -> Res<Expr> {
        let result = Ty::arith("unsigned long");
        if self.is("(") {
            let before = self.at;
            self.at += 1;
            if self.starts_type() {
                let (ty, name) = self.type_name()?;
                self.expect(")")?;
                if !self.is("{") {
                    if matches!(ty.bare(), Ty::Spread(..)) {
                        return Err(self.error_at(first, "a spread array has no size"));
                    }
                    let plain = self.slice(before + 1, self.at - 1) == name;
                    let text = (!plain).then(|| format!("{operator}({name})"));
                    return Ok(self.expr(first, result, text));
                }
            }
            self.at = before;
        }
        let operand = self.unary()?;
        if matches!(operand.ty.bare(), Ty::Spread(..)) {
            return Err(self.error_at(first, "a spread array has no size; its blocks have"));
        }
        let text = match &operand.place {
            Place::Remote { .. } => {
                self.must_know(first, &operand.ty)?;
                Some(format!("{operator}({})", self.declare(&operand.ty, "")))
            }
            Place::Here => self.compose(first, self.at, &[&operand]),
        };
        Ok(self.expr(first, result, text))
    }

    fn postfix(&mut self) -> Res<Expr> {
        let first = self.at;
        let base = self.primary()?;
        self.suffixed(first, base)
    }

    /// Indices, calls, members, `++` and `--` after an expression.
    fn suffixed(&mut self, first: usize, mut base: Expr) -> Res<Expr> {
        loop {
            base = match (self.token().kind, self.text_of(self.at)) {
                (Kind::Punct, "[") => {
                    self.at += 1;
                    let outer = std::mem::replace(&mut self.colon_operators, true);
                    let index = self.expression();
                    self.colon_operators = outer;
                    let index = self.value(index?)?;
                    self.expect("]")?;
                    self.index(first, base, index)?
                }
                (Kind::Punct, "(") => self.call(first, base)?,
                (Kind::Punct, "." | "->") => {
                    let arrow = self.is("->");
                    self.at += 2;
                    let name = self.text_of(self.at - 1).to_owned();
                    self.member(first, base, arrow, &name)?
                }
                (Kind::Punct, "++" | "--") => {
                    let operator = self.text_of(self.at).to_owned();
                    self.at += 1;
                    self.step(first, base, &operator, false)?
                }
                _ => return Ok(base),
            };
        }
    }

    fn primary(&mut self) -> Res<Expr> {
        let first = self.at;
        match self.token().kind {
            Kind::Number => {
                let text = self.text_of(self.at).to_ascii_lowercase();
                let hex = text.starts_with("0x");
                let floating =
                    text.contains('.') || !hex && text.contains('e') || hex && text.contains('p');
                self.at += 1;
                let ty = match () {
                    () if floating => Ty::arith("double"),
                    () if text.ends_with('l') => Ty::arith("long"),
                    () => Ty::int(),
                };
                Ok(self.expr(first, ty, None))
            }
            Kind::Char => {
                self.at += 1;
                Ok(self.expr(first, Ty::int(), None))
            }
            Kind::Text => {
                while self.token().kind == Kind::Text {
                    self.at += 1;
                }
                let ty = Ty::Array(Rc::new(Ty::arith("char")), None);
                Ok(self.expr(first, ty, None))
            }
            Kind::Name => self.named(),
            Kind::Punct if self.is("(") => {
                self.at += 1;
                let outer = std::mem::replace(&mut self.colon_operators, true);
                let inner =
                    if self.is("{") { self.statement_expression() } else { self.expression() };
                self.colon_operators = outer;
                let inner = inner?;
                self.expect(")")?;
                let text = match inner.reads.is_empty() {
                    true => self.compose(first, self.at, &[&inner]),
                    false => Some(format!("({})", self.inner(&inner))),
                };
                Ok(Expr { first, end: self.at, text, ..inner })
            }
            _ => {
                let found = self.text_of(self.at).to_owned();
                Err(self.error(format!("expected an expression before '{found}'")))
            }
        }
    }

    /// GNU: `({ ... })`.
    fn statement_expression(&mut self) -> Res<Expr> {
        let first = self.at;
        let (text, ty) = self.block()?;
        if ty.is_global() {
            return Err(self.error_at(first, "a statement expression cannot have a global value"));
        }
        Ok(self.expr(first, ty, Some(text)))
    }

    /// A name, and what the compiler knows by itself.
    fn named(&mut self) -> Res<Expr> {
        let first = self.at;
        let name = self.text_of(self.at).to_owned();
        self.at += 1;
        match &name[..] {
            "__builtin_va_arg" => {
                self.expect("(")?;
                let list = self.assignment()?;
                self.expect(",")?;
                let (ty, type_text) = self.type_name()?;
                self.expect(")")?;
                let text = ty
                    .mentions_global()
                    .then(|| format!("{name}({}, {type_text})", self.text(&list)));
                return Ok(self.expr(first, ty, text));
            }
            "__builtin_offsetof" | "__builtin_types_compatible_p" => {
                self.skip_brackets()?;
                return Ok(self.expr(first, Ty::arith("unsigned long"), None));
            }
            "_Generic" | "__builtin_choose_expr" | "__builtin_convertvector" => {
                self.skip_brackets()?;
                return Ok(self.expr(first, Ty::Unknown, None));
            }
            "__func__" | "__FUNCTION__" | "__PRETTY_FUNCTION__" => {
                return Ok(self.expr(first, Ty::local_ptr(Ty::arith("char")), None));
            }
            _ => {}
        }
        match self.lookup(&name) {
            Some(Symbol::Value(ty)) => Ok(self.expr(first, ty.clone(), None)),
            Some(Symbol::Type(_)) => {
                Err(self.error_at(first, format!("'{name}' is a type; a value is expected here")))
            }
            // A function that was not declared, as in programs of the time.
            None if self.is("(") && !name.starts_with("__") => {
                let func = Func { ret: Ty::int(), params: None, variadic: false };
                Ok(self.expr(first, Ty::Func(Rc::new(func)), None))
            }
            None if name.starts_with("__") => Ok(self.expr(first, Ty::Unknown, None)),
            None => Err(self.error_at(first, format!("'{name}' is not declared"))),
        }
    }
}

/// What C makes of two numbers, as far as the translator has to know.
fn arithmetic(left: &Ty, right: &Ty) -> Ty {
    match (left.is_number(), right.is_number()) {
        (true, true) if left.is_floating() => left.unqualified().clone(),
        (true, true) if right.is_floating() => right.unqualified().clone(),
        (true, true) => {
            let long = |ty: &Ty| matches!(ty.bare(), Ty::Arith(name) if name.contains("long"));
            if long(left) || long(right) { Ty::arith("long") } else { Ty::int() }
        }
        _ => Ty::Unknown,
    }
}
