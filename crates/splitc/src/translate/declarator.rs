//! Declarators, type names and parameters.

use std::rc::Rc;

use super::decl::Declared;
use super::{Parser, Res, Symbol};
use crate::lex::Kind;
use crate::types::{Func, Reach, Ty};

/// What stands after a name or a declarator in brackets.
enum Suffix {
    Array(Vec<Option<Rc<str>>>),
    Spread(Vec<Rc<str>>, Vec<Option<Rc<str>>>),
    Func(Option<Vec<(String, Ty)>>, bool),
}

impl Parser<'_> {
    /// A declarator; `is_abstract`: one that may have no name.
    pub(super) fn declarator(&mut self, base: Ty, is_abstract: bool) -> Res<Declared> {
        self.enter()?;
        let first = self.at;
        let mut ty = base;
        self.skip_attributes()?;
        while self.accept("*") {
            let (mut reach, mut words) = (Reach::Local, Vec::new());
            loop {
                let word = self.text_of(self.at).to_owned();
                match &word[..] {
                    "global" => reach = Reach::Global,
                    "spread" => reach = Reach::Spread,
                    "const" | "__const" | "__const__" => words.push("const"),
                    "volatile" | "__volatile" | "__volatile__" => words.push("volatile"),
                    "restrict" | "__restrict" | "__restrict__" => {}
                    "__attribute__" | "__attribute" => {
                        self.skip_attributes()?;
                        continue;
                    }
                    _ => break,
                }
                self.at += 1;
            }
            ty = Ty::Ptr(Rc::new(ty), reach);
            for word in words {
                ty = Ty::Qualified(word.into(), Rc::new(ty));
            }
        }
        let mut declared = self.direct_declarator(ty, is_abstract)?;
        self.skip_attributes()?;
        (declared.first, declared.end) = (first, self.at);
        self.depth -= 1;
        Ok(declared)
    }

    fn direct_declarator(&mut self, ty: Ty, is_abstract: bool) -> Res<Declared> {
        let first = self.at;
        let inner = self.is("(") && self.is_nested(is_abstract);
        if inner {
            self.skip_brackets()?;
            let (ty, _) = self.suffixes(ty)?;
            let end = self.at;
            self.at = first + 1;
            let mut declared = self.declarator(ty, is_abstract)?;
            self.expect(")")?;
            self.at = end;
            declared.end = end;
            return Ok(declared);
        }
        let mut name = String::new();
        if self.token().kind == Kind::Name && !self.is_any(&["__attribute__", "__asm__", "asm"]) {
            name = self.text_of(self.at).to_owned();
            self.at += 1;
        } else if !is_abstract {
            return Err(self.error("expected a name in this declaration"));
        }
        self.skip_attributes()?;
        let (ty, old_style) = self.suffixes(ty)?;
        Ok(Declared { name, ty, first, end: self.at, old_style })
    }

    /// Whether the bracket here contains a declarator, and no parameters.
    fn is_nested(&self, is_abstract: bool) -> bool {
        match self.peek(1) {
            "*" | "(" | "[" | "__attribute__" => true,
            ")" => false,
            word => {
                let is_type = matches!(self.lookup(word), Some(Symbol::Type(_)));
                !is_abstract || (!is_type && !self.tokens_start_type(self.at + 1))
            }
        }
    }

    fn tokens_start_type(&self, index: usize) -> bool {
        let word = self.text_of(index);
        matches!(self.lookup(word), Some(Symbol::Type(_)))
            || [
                "void", "char", "short", "int", "long", "float", "double", "signed", "unsigned",
                "const",
            ]
            .contains(&word)
            || ["volatile", "struct", "union", "enum", "register", "..."].contains(&word)
            || word.starts_with("__")
            || word.starts_with("_F")
    }

    /// What follows the name, applied to the type from the outside in.
    fn suffixes(&mut self, base: Ty) -> Res<(Ty, Option<Vec<String>>)> {
        let mut suffixes = Vec::new();
        let mut old_style = None;
        loop {
            if self.is("[") || self.is("::") {
                suffixes.push(self.dimensions()?);
            } else if self.is("(") {
                let (params, variadic, names) = self.parameters()?;
                old_style = old_style.or(names);
                suffixes.push(Suffix::Func(params, variadic));
            } else {
                break;
            }
        }
        let mut ty = base;
        let array = |ty: Ty, sizes: Vec<Option<Rc<str>>>| {
            sizes.into_iter().rev().fold(ty, |ty, size| Ty::Array(Rc::new(ty), size))
        };
        for suffix in suffixes.into_iter().rev() {
            ty = match suffix {
                Suffix::Array(sizes) => array(ty, sizes),
                Suffix::Spread(spread, block) => {
                    Ty::Spread(spread.into(), Rc::new(array(ty, block)))
                }
                Suffix::Func(params, variadic) => {
                    Ty::Func(Rc::new(Func { ret: ty, params, variadic }))
                }
            };
        }
        Ok((ty, old_style))
    }

    /// `[n][m]` or `[n]::[m]`.
    fn dimensions(&mut self) -> Res<Suffix> {
        let first = self.at;
        let (mut sizes, mut spread): (Vec<Option<Rc<str>>>, Option<usize>) = (Vec::new(), None);
        loop {
            if self.is("::") {
                if spread.is_some() || sizes.is_empty() {
                    return Err(self.error("'::' stands once, after the sizes of a spread array"));
                }
                self.at += 1;
                spread = Some(sizes.len());
            } else if self.accept("[") {
                while self.is_any(&["static", "const", "restrict", "__restrict", "volatile"]) {
                    self.at += 1;
                }
                if self.is("*") && self.peek(1) == "]" {
                    self.at += 1;
                }
                let size = match self.is("]") {
                    true => None,
                    false => {
                        let size = self.assignment()?;
                        let size = self.value(size)?;
                        Some(self.text(&size).into())
                    }
                };
                self.expect("]")?;
                sizes.push(size);
            } else {
                break;
            }
        }
        let Some(spread) = spread else { return Ok(Suffix::Array(sizes)) };
        let block = sizes.split_off(spread);
        // The first size of a parameter plays no role.
        let sizes = sizes.into_iter().enumerate().map(|(number, size)| match (number, size) {
            (_, Some(size)) => Ok(size),
            (0, None) => Ok("0".into()),
            _ => Err(self.error_at(first, "a spread array needs all its sizes")),
        });
        Ok(Suffix::Spread(sizes.collect::<Res<_>>()?, block))
    }

    /// Parameters: their types, whether there are more, and their names in the old style.
    #[allow(clippy::type_complexity)]
    fn parameters(&mut self) -> Res<(Option<Vec<(String, Ty)>>, bool, Option<Vec<String>>)> {
        self.expect("(")?;
        if self.accept(")") {
            return Ok((None, false, Some(Vec::new())));
        }
        let word = self.text_of(self.at);
        let is_old = self.token().kind == Kind::Name
            && !self.starts_declaration()
            && [",", ")"].contains(&self.peek(1))
            && !matches!(self.lookup(word), Some(Symbol::Type(_)));
        if is_old {
            let mut names = Vec::new();
            loop {
                names.push(self.text_of(self.at).to_owned());
                self.at += 1;
                if !self.accept(",") {
                    break;
                }
            }
            self.expect(")")?;
            return Ok((None, false, Some(names)));
        }
        let (mut params, mut variadic) = (Vec::new(), false);
        // Sizes of later parameters may use earlier ones.
        self.push_scope();
        loop {
            if self.accept("...") {
                variadic = true;
                break;
            }
            let first = self.at;
            let spec = self.specifiers()?;
            if spec.is_implicit && spec.storage.is_empty() {
                self.pop_scope();
                return Err(self.error_at(first, "expected a parameter"));
            }
            let declared = self.declarator(spec.ty, true)?;
            let ty = adjust(declared.ty);
            self.define(&declared.name, Symbol::Value(ty.clone()));
            params.push((declared.name, ty));
            if !self.accept(",") {
                break;
            }
        }
        self.pop_scope();
        self.expect(")")?;
        if let [(name, Ty::Void)] = &params[..]
            && name.is_empty()
        {
            params.clear();
        }
        Ok((Some(params), variadic, None))
    }

    /// A type name, as in a cast; and its C text.
    pub(super) fn type_name(&mut self) -> Res<(Ty, String)> {
        let spec = self.specifiers()?;
        let text = spec.text.clone();
        let declared = self.declarator(spec.ty, true)?;
        if declared.ty.mentions_global() {
            let text = self.declare(&declared.ty, "");
            return Ok((declared.ty, text));
        }
        let rest = self.slice(declared.first, declared.end);
        Ok((declared.ty, format!("{text}{}{rest}", if rest.is_empty() { "" } else { " " })))
    }
}

/// The type of a parameter that is declared as an array or a function.
pub(super) fn adjust(ty: Ty) -> Ty {
    match ty {
        Ty::Array(of, _) => Ty::Ptr(of, Reach::Local),
        Ty::Func(_) => Ty::local_ptr(ty),
        Ty::Qualified(word, to) => Ty::Qualified(word, Rc::new(adjust((*to).clone()))),
        other => other,
    }
}
