//! External declarations, functions and statements.

use std::fmt::Write as _;
use std::rc::Rc;

use super::decl::{Declared, Spec};
use super::declarator::adjust;
use super::{Expr, Parser, Res, Symbol};
use crate::lex::Kind;
use crate::types::{Func, Reach, Ty};

/// A declarator, its initialiser, and the names that hold the sizes of a spread array.
type Item = (Declared, Option<Expr>);

impl Parser<'_> {
    /// An external declaration: its C text.
    pub(super) fn external(&mut self) -> Res<String> {
        if self.accept(";") {
            return Ok(";".into());
        }
        if self.is_any(&["asm", "__asm__", "_Static_assert"])
            || self.is("__extension__") && self.peek(1) == "asm"
        {
            let first = self.at;
            self.at += 1;
            self.skip_brackets()?;
            self.accept(";");
            return Ok(self.slice(first, self.at).into());
        }
        self.declaration(true)
    }

    /// A declaration, or the definition of a function.
    fn declaration(&mut self, is_external: bool) -> Res<String> {
        let first = self.at;
        if self.is("_Static_assert") {
            self.at += 1;
            self.skip_brackets()?;
            self.expect(";")?;
            return Ok(self.slice(first, self.at).into());
        }
        let spec = self.specifiers()?;
        let plain = spec.text == self.slice(first, self.at);
        if spec.is_implicit && spec.storage.is_empty() && !is_external {
            return Err(self.error_at(first, "expected a declaration"));
        }
        let mut items: Vec<Item> = Vec::new();
        while !self.is(";") {
            let declared = self.declarator(spec.ty.clone(), false)?;
            if items.is_empty()
                && matches!(declared.ty, Ty::Func(_))
                && (self.is("{") || self.starts_declaration())
            {
                return self.function(&spec, declared);
            }
            if spec.is_implicit && spec.storage.is_empty() && !matches!(declared.ty, Ty::Func(_)) {
                let why = format!("'{}' has no type", declared.name);
                return Err(self.error_at(declared.first, why));
            }
            items.push(self.init_declarator(&spec, declared)?);
            if !self.accept(",") {
                break;
            }
        }
        self.expect(";")?;
        let is_changed = |(declared, init): &Item| {
            declared.ty.mentions_global() || init.as_ref().is_some_and(|init| init.text.is_some())
        };
        if plain && !items.iter().any(is_changed) {
            return Ok(self.slice(first, self.at).into());
        }
        let text = self.declaration_text(&spec, &items, is_external)?;
        let lines = |text: &str| text.matches('\n').count();
        // The text may have fewer lines than the declaration had.
        let same = !is_external && lines(&text) == lines(self.slice(first, self.at));
        Ok(if same { text } else { text + &self.marker() })
    }

    fn init_declarator(&mut self, spec: &Spec, mut declared: Declared) -> Res<Item> {
        self.skip_attributes()?;
        declared.end = self.at;
        let ty = declared.ty.clone();
        if spec.is_typedef {
            if matches!(ty, Ty::Spread(..)) {
                return Err(self.error_at(declared.first, "a typedef cannot name a spread array"));
            }
            self.define(&declared.name, Symbol::Type(ty));
            return Ok((declared, None));
        }
        self.define(&declared.name, Symbol::Value(ty.clone()));
        if !self.accept("=") {
            return Ok((declared, None));
        }
        if matches!(ty, Ty::Spread(..)) {
            return Err(self.error_at(declared.first, "a spread array has no initialiser"));
        }
        let init = self.initializer(&ty)?;
        if matches!(ty.bare(), Ty::Unknown) && spec.storage.contains("__auto_type") {
            self.define(&declared.name, Symbol::Value(init.ty.clone()));
        }
        Ok((declared, Some(init)))
    }

    /// The C text of a declaration.
    fn declaration_text(&mut self, spec: &Spec, items: &[Item], is_external: bool) -> Res<String> {
        let rewrite = items.iter().any(|(declared, _)| declared.ty.mentions_global());
        let mut text = String::new();
        if !rewrite {
            text.push_str(&spec.text);
            for (number, (declared, init)) in items.iter().enumerate() {
                text.push_str(if number == 0 { " " } else { ", " });
                text.push_str(self.slice(declared.first, declared.end));
                if let Some(init) = init {
                    let _ = write!(text, " = {}", self.text(init));
                }
            }
            text.push(';');
            return Ok(text);
        }
        if let Some(definition) = &spec.definition {
            let _ = write!(text, "{definition}; ");
        }
        for (declared, init) in items {
            if let Ty::Spread(sizes, block) = &declared.ty {
                text.push_str(&self.spread_array(spec, declared, sizes, block, is_external)?);
                continue;
            }
            let storage = &spec.storage;
            let declaration = self.declare(&declared.ty, &declared.name);
            let _ = write!(text, "{storage} {declaration}");
            if let Some(init) = init {
                let _ = write!(text, " = {}", self.text(init));
            }
            text.push_str("; ");
        }
        Ok(text)
    }

    /// The C text that declares a spread array, and has its memory allocated.
    fn spread_array(
        &mut self,
        spec: &Spec,
        declared: &Declared,
        sizes: &Rc<[Rc<str>]>,
        block: &Rc<Ty>,
        is_external: bool,
    ) -> Res<String> {
        let name = &declared.name;
        self.must_know(declared.first, block)?;
        let count =
            sizes.iter().map(|size| format!("(long)({size})")).collect::<Vec<_>>().join(" * ");
        if spec.is_extern {
            return Ok(format!("extern quipu_sp {name}; "));
        }
        let of = self.declare(block, "");
        if is_external || spec.is_static {
            // Allocated before the program starts, when the number of processes is known.
            let register = self.fresh("spread");
            let storage = if spec.is_static { "static " } else { "" };
            if !is_external {
                // The function would have to be a nested one.
                return Err(self.error_at(
                    declared.first,
                    "a static spread array stands outside of functions",
                ));
            }
            let _ = write!(
                self.after,
                " static void {register}_allocate(void) {{ quipu_sc_spread_array(&{name}, {count}, sizeof({of})); }} \
                 static void __attribute__((constructor)) {register}(void) {{ \
                 quipu_sc_at_start({register}_allocate); }}"
            );
            return Ok(format!("{storage}quipu_sp {name}; "));
        }
        // The sizes are those of now, whatever becomes of the variables in them.
        let mut text = String::new();
        let mut kept: Vec<Rc<str>> = Vec::new();
        for size in sizes.iter() {
            let variable = self.fresh("size");
            let _ = write!(text, "long {variable} = (long)({size}); ");
            kept.push(variable.into());
        }
        let block = Rc::new(self.keep_sizes(block, &mut text));
        let count = kept.join(" * ");
        let of = self.declare(&block, "");
        let _ = write!(
            text,
            "quipu_sp {name} __attribute__((cleanup(quipu_sc_pop))) = quipu_sc_push({count}, sizeof({of})); "
        );
        self.define(name, Symbol::Value(Ty::Spread(kept.into(), block)));
        Ok(text)
    }

    /// A type whose array sizes are variables that are declared in `text`.
    fn keep_sizes(&mut self, ty: &Ty, text: &mut String) -> Ty {
        match ty {
            Ty::Array(of, Some(size)) => {
                let variable = self.fresh("size");
                let _ = write!(text, "long {variable} = (long)({size}); ");
                let of = self.keep_sizes(of, text);
                Ty::Array(Rc::new(of), Some(variable.into()))
            }
            other => other.clone(),
        }
    }

    /// A function definition.
    fn function(&mut self, spec: &Spec, declared: Declared) -> Res<String> {
        let Ty::Func(func) = declared.ty.clone() else {
            return Err(self.error_at(declared.first, "expected a function"));
        };
        let mut params = func.params.clone().unwrap_or_default();
        let old = declared.old_style.clone().filter(|_| func.params.is_none());
        self.push_scope();
        let mut old_text = String::new();
        if let Some(names) = &old {
            (params, old_text) = self.old_parameters(names)?;
        }
        let known =
            Func { ret: func.ret.clone(), params: Some(params.clone()), variadic: func.variadic };
        let known = Ty::Func(Rc::new(known));
        self.scopes[0].insert(declared.name.clone(), Symbol::Value(known.clone()));
        let mut kept = String::new();
        for (name, ty) in params.clone() {
            let ty = match &ty {
                Ty::Spread(sizes, block) => self.keep_parameter(sizes, block, &mut kept),
                _ => ty,
            };
            self.define(&name, Symbol::Value(ty));
        }
        let old_globals = old.is_some() && params.iter().any(|(_, ty)| ty.mentions_global());
        let head = if declared.ty.mentions_global() || old_globals {
            let name = match &old {
                Some(names) => format!("{}({})", declared.name, names.join(", ")),
                None => declared.name.clone(),
            };
            let ty = if old.is_some() { &func.ret } else { &declared.ty };
            let text = self.declare(ty, &name);
            format!("{} {text}", spec.storage)
        } else {
            format!("{} {}", spec.text, self.slice(declared.first, declared.end))
        };
        let outer = self.ret.replace(func.ret.clone());
        let marker = self.marker();
        if !self.is("{") {
            return Err(self.error("expected the body of the function"));
        }
        let (body, _) = self.block_with(&kept)?;
        self.ret = outer;
        self.pop_scope();
        Ok(format!("{head} {old_text}{marker}{body}"))
    }

    /// The sizes of a spread array that is a parameter are those of the call.
    fn keep_parameter(&mut self, sizes: &Rc<[Rc<str>]>, block: &Rc<Ty>, text: &mut String) -> Ty {
        let mut kept = Vec::new();
        for (number, size) in sizes.iter().enumerate() {
            // The first one plays no role, and may name what is not there.
            if number == 0 {
                kept.push(size.clone());
                continue;
            }
            let variable = self.fresh("size");
            let _ = write!(text, "long {variable} = (long)({size}); ");
            kept.push(variable.into());
        }
        let block = self.keep_sizes(block, text);
        Ty::Spread(kept.into(), Rc::new(block))
    }

    /// Parameters that are declared between the head and the body; their C text.
    #[allow(clippy::type_complexity)]
    fn old_parameters(&mut self, names: &[String]) -> Res<(Vec<(String, Ty)>, String)> {
        let (mut found, mut text) = (Vec::new(), String::new());
        while !self.is("{") {
            let spec = self.specifiers()?;
            let mut items = Vec::new();
            loop {
                let mut declared = self.declarator(spec.ty.clone(), false)?;
                if !names.contains(&declared.name) {
                    let why = format!("'{}' is not a parameter", declared.name);
                    return Err(self.error_at(declared.first, why));
                }
                declared.ty = adjust(declared.ty);
                found.push((declared.name.clone(), declared.ty.clone()));
                items.push(declared);
                if !self.accept(",") {
                    break;
                }
            }
            self.expect(";")?;
            if items.iter().any(|declared| declared.ty.mentions_global()) {
                for declared in items {
                    let _ = write!(text, "{}; ", self.declare(&declared.ty, &declared.name));
                }
            } else {
                let (first, last) = (items[0].first, items[items.len() - 1].end);
                let _ = write!(text, "{} {}; ", spec.text, self.slice(first, last));
            }
        }
        let ty = |name: &String| {
            let known = found.iter().find(|(known, _)| known == name);
            known.map_or(Ty::int(), |(_, ty)| ty.clone())
        };
        Ok((names.iter().map(|name| (name.clone(), ty(name))).collect(), text))
    }

    /// A block: its C text, and the type of its last expression.
    pub(super) fn block(&mut self) -> Res<(String, Ty)> {
        self.block_with("")
    }

    fn block_with(&mut self, begin: &str) -> Res<(String, Ty)> {
        self.enter()?;
        let outer = std::mem::replace(&mut self.colon_operators, true);
        self.push_scope();
        let mut text = String::from("{");
        text.push_str(begin);
        self.expect("{")?;
        let mut copied = self.previous_end();
        let mut last = Ty::Void;
        while !self.is("}") {
            if self.token().kind == Kind::End {
                return Err(self.error("'}' is missing"));
            }
            text.push_str(&self.src[copied..self.token().start]);
            let (statement, ty) = self.statement()?;
            text.push_str(&statement);
            last = ty;
            copied = self.previous_end();
        }
        text.push_str(&self.src[copied..self.token().start]);
        self.expect("}")?;
        text.push('}');
        self.pop_scope();
        self.colon_operators = outer;
        self.depth -= 1;
        Ok((text, last))
    }

    /// A statement or declaration: its C text, and the type of its value if it is an expression.
    fn statement(&mut self) -> Res<(String, Ty)> {
        self.enter()?;
        let result = self.statement_inner();
        self.depth -= 1;
        result
    }

    fn statement_inner(&mut self) -> Res<(String, Ty)> {
        let first = self.at;
        if self.is("{") {
            return Ok((self.block()?.0, Ty::Void));
        }
        if self.accept(";") {
            return Ok((";".into(), Ty::Void));
        }
        let is_label = self.token().kind == Kind::Name
            && self.peek(1) == ":"
            && !["default", "case"].contains(&self.text_of(self.at))
            && !self.is_colon_operator(self.at + 1);
        if is_label {
            self.at += 2;
            let label = self.slice(first, self.at).to_owned();
            return self.after_label(label);
        }
        if self.starts_declaration() && !self.is_expression_of_typedef() {
            let text = self.declaration(false)?;
            return Ok((text, Ty::Void));
        }
        let word = if self.token().kind == Kind::Name {
            self.text_of(self.at).to_owned()
        } else {
            String::new()
        };
        let text = match &word[..] {
            "if" | "while" | "switch" => self.controlled()?,
            "for" => self.loop_for()?,
            "do" => self.loop_do()?,
            "return" => self.return_statement()?,
            "case" => {
                self.at += 1;
                let outer = std::mem::replace(&mut self.colon_operators, false);
                self.conditional()?;
                if self.accept("...") {
                    self.conditional()?;
                }
                self.colon_operators = outer;
                self.expect(":")?;
                let label = self.slice(first, self.at).to_owned();
                return self.after_label(label);
            }
            "default" => {
                self.at += 1;
                self.expect(":")?;
                return self.after_label("default:".into());
            }
            "goto" | "break" | "continue" | "asm" | "__asm__" | "__asm" | "__label__" => {
                while !self.accept(";") {
                    if self.token().kind == Kind::End {
                        return Err(self.error_at(first, "';' is missing"));
                    }
                    self.at += 1;
                }
                self.slice(first, self.at).into()
            }
            _ => {
                let expr = self.expression()?;
                let expr = if Self::is_remote(&expr) { self.value(expr)? } else { expr };
                self.expect(";")?;
                let ty = expr.ty.clone();
                return Ok((format!("{};", self.text(&expr)), ty));
            }
        };
        Ok((text, Ty::Void))
    }

    /// `x := y` at the beginning of a statement is no label.
    fn is_colon_operator(&self, colon: usize) -> bool {
        let (colon_end, next) = (self.tokens.list[colon].end, &self.tokens.list[colon + 1]);
        let follows = next.start == colon_end;
        // `name:-` could be a label in front of an expression with a sign; a variable decides.
        let name = self.text_of(colon - 1);
        let is_variable = matches!(self.lookup(name), Some(Symbol::Value(_)));
        match self.text_of(colon + 1) {
            "=" => follows,
            "-" => follows && is_variable,
            _ => false,
        }
    }

    /// An expression that begins with the name of a type which is a variable further in is not followed.
    fn is_expression_of_typedef(&self) -> bool {
        matches!(self.lookup(self.text_of(self.at)), Some(Symbol::Type(_)))
            && [".", "->", "=", "++", "--", "+=", "["].contains(&self.peek(1))
    }

    fn after_label(&mut self, label: String) -> Res<(String, Ty)> {
        let end = self.previous_end();
        let space = self.src[end..self.token().start].to_owned();
        if self.is("}") {
            return Ok((label, Ty::Void));
        }
        let (text, ty) = self.statement()?;
        Ok((format!("{label}{space}{text}"), ty))
    }

    /// A condition in parentheses, with the text in front of it.
    fn condition(&mut self, first: usize) -> Res<String> {
        self.expect("(")?;
        let outer = std::mem::replace(&mut self.colon_operators, true);
        let condition = self.expression()?;
        self.colon_operators = outer;
        let condition = self.truth(condition)?;
        self.expect(")")?;
        Ok(self
            .compose(first, self.at, &[&condition])
            .unwrap_or_else(|| self.slice(first, self.at).into()))
    }

    /// The statement that a condition or a loop controls.
    fn body(&mut self) -> Res<String> {
        let space = self.src[self.previous_end()..self.token().start].to_owned();
        let (text, _) = self.statement()?;
        Ok(format!("{space}{text}"))
    }

    fn controlled(&mut self) -> Res<String> {
        let mut text = String::new();
        // A chain of `else if` is as long as it likes.
        loop {
            let first = self.at;
            let is_if = self.is("if");
            self.at += 1;
            text.push_str(&self.condition(first)?);
            text.push_str(&self.body()?);
            if !is_if || !self.is("else") {
                return Ok(text);
            }
            text.push_str(&self.src[self.previous_end()..self.token().start]);
            text.push_str("else");
            self.at += 1;
            if self.is("if") {
                text.push_str(&self.src[self.previous_end()..self.token().start]);
                continue;
            }
            let rest = self.body()?;
            // `else` and a name must not run together.
            if !rest.starts_with(char::is_whitespace) {
                text.push(' ');
            }
            text.push_str(&rest);
            return Ok(text);
        }
    }

    fn loop_do(&mut self) -> Res<String> {
        self.at += 1;
        let mut text = String::from("do ");
        text.push_str(&self.body()?);
        let space = &self.src[self.previous_end()..self.token().start];
        text.push_str(space);
        let first = self.at;
        self.expect("while")?;
        text.push_str(&self.condition(first)?);
        self.expect(";")?;
        text.push(';');
        Ok(text)
    }

    fn loop_for(&mut self) -> Res<String> {
        let first = self.at;
        self.at += 1;
        self.expect("(")?;
        let mut text = self.slice(first, self.at).to_owned();
        self.push_scope();
        if self.starts_declaration() {
            text.push_str(&self.declaration(false)?);
        } else {
            text.push_str(&self.loop_part(false, ";")?);
        }
        text.push_str(&self.loop_part(true, ";")?);
        text.push_str(&self.loop_part(false, ")")?);
        text.push_str(&self.body()?);
        self.pop_scope();
        Ok(text)
    }

    /// One of the three expressions of a loop, which may be missing.
    fn loop_part(&mut self, is_condition: bool, end: &str) -> Res<String> {
        let space = self.src[self.previous_end()..self.token().start].to_owned();
        if self.accept(end) {
            return Ok(format!("{space}{end}"));
        }
        let expr = self.expression()?;
        let expr = if is_condition { self.truth(expr)? } else { self.value(expr)? };
        self.expect(end)?;
        Ok(format!("{space}{}{end}", self.text(&expr)))
    }

    fn return_statement(&mut self) -> Res<String> {
        self.at += 1;
        if self.accept(";") {
            return Ok("return;".into());
        }
        let value = self.expression()?;
        let ty = self.ret.clone().unwrap_or(Ty::Unknown);
        let value = match ty.bare() {
            Ty::Unknown | Ty::Void => self.value(value)?,
            _ if ty.reach() == Some(Reach::Local) && !value.ty.is_global() => value,
            _ => self.converted(value, &ty)?,
        };
        self.expect(";")?;
        Ok(format!("return {};", self.text(&value)))
    }
}
