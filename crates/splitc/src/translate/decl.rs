//! Declarations, specifiers and structures.

use std::collections::HashMap;
use std::rc::Rc;

use super::{Parser, Res, Symbol};
use crate::lex::Kind;
use crate::types::{Field, Struct, Ty};

/// Words that begin specifiers and are no types.
const STORAGE: [&str; 15] = [
    "typedef",
    "extern",
    "static",
    "auto",
    "register",
    "inline",
    "__inline",
    "__inline__",
    "_Noreturn",
    "_Thread_local",
    "__thread",
    "__extension__",
    "thread_local",
    "noreturn",
    "__auto_type",
];
const QUALIFIERS: [&str; 10] = [
    "const",
    "volatile",
    "restrict",
    "__const",
    "__const__",
    "__volatile",
    "__volatile__",
    "__restrict",
    "__restrict__",
    "_Atomic",
];
/// Words of arithmetic types.
const WORDS: [&str; 24] = [
    "char",
    "short",
    "int",
    "long",
    "float",
    "double",
    "signed",
    "unsigned",
    "_Bool",
    "_Complex",
    "__complex__",
    "__signed__",
    "__signed",
    "__int128",
    "__int128_t",
    "__uint128_t",
    "_Float128",
    "_Float64",
    "_Float32",
    "_Float64x",
    "_Float32x",
    "__float128",
    "_Float16",
    "__complex",
];

/// The specifiers of a declaration.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) ty: Ty,
    pub(super) is_typedef: bool,
    pub(super) is_extern: bool,
    pub(super) is_static: bool,
    /// Storage classes and the like, as C has them in front.
    pub(super) storage: String,
    /// C text of all of it.
    pub(super) text: String,
    /// It defines a structure, union or enumeration: C text of the definition alone.
    pub(super) definition: Option<String>,
    /// Nothing says what type it is.
    pub(super) is_implicit: bool,
}

/// What a declarator declares.
#[derive(Clone, Debug)]
pub(super) struct Declared {
    pub(super) name: String,
    pub(super) ty: Ty,
    /// Tokens.
    pub(super) first: usize,
    pub(super) end: usize,
    /// Names of parameters of a definition of the old style.
    pub(super) old_style: Option<Vec<String>>,
}

impl Parser<'_> {
    /// Whether a declaration begins here.
    pub(super) fn starts_declaration(&self) -> bool {
        if self.token().kind != Kind::Name {
            return false;
        }
        let text = self.text_of(self.at);
        self.is_type_word(text)
            || STORAGE.contains(&text) && !(text == "__extension__" && self.peek(1) == "(")
            || ["_Static_assert", "_Alignas", "__attribute__", "__attribute"].contains(&text)
            // `name:` is a label even where the name is a type.
            || matches!(self.lookup(text), Some(Symbol::Type(_))) && self.peek(1) != ":"
    }

    fn is_type_word(&self, text: &str) -> bool {
        WORDS.contains(&text)
            || QUALIFIERS.contains(&text)
            || ["void", "struct", "union", "enum", "typeof", "__typeof__", "__typeof"]
                .contains(&text)
    }

    /// Whether a type name begins here, as after `(`.
    pub(super) fn starts_type(&self) -> bool {
        if self.token().kind != Kind::Name {
            return false;
        }
        let text = self.text_of(self.at);
        self.is_type_word(text)
            || text == "__extension__" && self.is_type_word(self.peek(1))
            || matches!(self.lookup(text), Some(Symbol::Type(_)))
    }

    /// Skips attributes and names for the assembler.
    pub(super) fn skip_attributes(&mut self) -> Res<()> {
        while self.is_any(&["__attribute__", "__attribute", "__asm__", "asm", "__asm", "_Alignas"])
        {
            self.at += 1;
            self.skip_brackets()?;
        }
        Ok(())
    }

    /// Specifiers of a declaration.
    pub(super) fn specifiers(&mut self) -> Res<Spec> {
        let first = self.at;
        let (mut words, mut storage, mut qualifiers) = (Vec::new(), Vec::new(), Vec::new());
        let (mut ty, mut definition): (Option<Ty>, Option<String>) = (None, None);
        // Pieces that have other text.
        let (mut text, mut copied) = (String::new(), self.token().start);
        loop {
            let word = self.text_of(self.at).to_owned();
            let is_name = self.token().kind == Kind::Name;
            if is_name && STORAGE.contains(&&word[..]) {
                storage.push(word);
                self.at += 1;
            } else if is_name && QUALIFIERS.contains(&&word[..]) {
                qualifiers.push(word);
                self.at += 1;
                if self.is("(") {
                    self.skip_brackets()?;
                    ty = Some(Ty::Unknown);
                }
            } else if is_name && WORDS.contains(&&word[..]) {
                words.push(word);
                self.at += 1;
            } else if self.is_any(&["__attribute__", "__attribute", "_Alignas"]) {
                self.skip_attributes()?;
            } else if self.is_any(&["struct", "union", "enum"]) {
                text.push_str(&self.src[copied..self.token().start]);
                let (found, body, defines) = self.tagged()?;
                text.push_str(&body);
                copied = self.previous_end();
                definition = defines.then_some(body);
                ty = Some(found);
            } else if self.is_any(&["typeof", "__typeof__", "__typeof"]) {
                ty = Some(self.type_of()?);
            } else if self.accept("void") {
                ty = Some(Ty::Void);
            } else if let (true, None, true, Some(Symbol::Type(named))) =
                (is_name, &ty, words.is_empty(), self.lookup(&word))
            {
                ty = Some(Ty::Named(word.into(), Rc::new(named.clone())));
                self.at += 1;
            } else {
                break;
            }
        }
        text.push_str(
            &self.src[copied..if self.at > first { self.previous_end() } else { copied }],
        );
        let is_implicit = ty.is_none() && words.is_empty();
        let mut ty = ty.unwrap_or_else(|| match words.is_empty() {
            true => Ty::int(),
            false => Ty::arith(&words.join(" ")),
        });
        if storage.iter().any(|word| word == "__auto_type") {
            ty = Ty::Unknown;
        }
        for word in ["const", "volatile"] {
            // `const`, `__const` and `__const__`.
            if qualifiers.iter().any(|found| found.trim_matches('_') == word) {
                ty = Ty::Qualified(word.into(), Rc::new(ty));
            }
        }
        let has = |word: &str| storage.iter().any(|found| found == word);
        Ok(Spec {
            is_typedef: has("typedef"),
            is_extern: has("extern"),
            is_static: has("static"),
            storage: storage.join(" "),
            ty,
            text,
            definition,
            is_implicit,
        })
    }

    /// `typeof (...)`.
    fn type_of(&mut self) -> Res<Ty> {
        self.at += 1;
        self.expect("(")?;
        let ty = if self.starts_type() { self.type_name()?.0 } else { self.expression()?.ty };
        self.expect(")")?;
        Ok(ty)
    }

    /// A structure, union or enumeration. Its type, its C text, and whether it is a definition.
    fn tagged(&mut self) -> Res<(Ty, String, bool)> {
        let first = self.at;
        let keyword = match self.text_of(self.at) {
            "struct" => "struct",
            "union" => "union",
            _ => "enum",
        };
        self.at += 1;
        self.skip_attributes()?;
        let head_end = self.previous_end();
        let named = self.token().kind == Kind::Name;
        let tag = if named { self.text_of(self.at).to_owned() } else { self.fresh("anonymous") };
        self.at += usize::from(named);
        let head = &self.src[self.tokens.list[first].start..head_end];
        let mut text = format!("{head} {tag}");
        if !self.is("{") {
            if !named {
                return Err(self.error(format!("expected a name or '{{' after '{keyword}'")));
            }
            let ty = if keyword == "enum" {
                Ty::Enum(tag.into())
            } else {
                self.reference(keyword, &tag)
            };
            return Ok((ty, text, false));
        }
        if keyword == "enum" {
            let body = self.enumerators()?;
            text.push_str(&body);
            return Ok((Ty::Enum(tag.into()), text, true));
        }
        let number = self.introduce(keyword, &tag);
        let (fields, body) = self.members()?;
        self.structs[number].fields = Some(fields);
        // An anonymous member has to stay without a tag.
        if !named && self.is(";") {
            text = head.to_owned();
        }
        text.push_str(&body);
        let end = self.previous_end();
        self.skip_attributes()?;
        text.push_str(&self.src[end..self.previous_end()]);
        Ok((Ty::Struct(number), text, true))
    }

    /// A structure that is named here, and perhaps defined elsewhere.
    fn reference(&mut self, keyword: &'static str, tag: &str) -> Ty {
        let known = self.tags.iter().rev().find_map(|tags| tags.get(tag).copied());
        // `struct s;` in an inner block is a new one.
        let known = known.filter(|_| !self.is(";") || self.tags.len() == 1);
        Ty::Struct(known.unwrap_or_else(|| self.introduce(keyword, tag)))
    }

    fn introduce(&mut self, keyword: &'static str, tag: &str) -> usize {
        if let Some(known) = self.tags.last().and_then(|tags| tags.get(tag).copied())
            && self.structs[known].fields.is_none()
        {
            return known;
        }
        self.structs.push(Struct { keyword, tag: tag.into(), fields: None });
        let number = self.structs.len() - 1;
        if let Some(tags) = self.tags.last_mut() {
            tags.insert(tag.into(), number);
        }
        number
    }

    fn enumerators(&mut self) -> Res<String> {
        let first = self.at;
        self.expect("{")?;
        while !self.is("}") {
            let name = self.text_of(self.at).to_owned();
            self.at += 1;
            self.skip_attributes()?;
            if self.accept("=") {
                self.conditional()?;
            }
            self.define(&name, Symbol::Value(Ty::int()));
            if !self.accept(",") {
                break;
            }
        }
        self.expect("}")?;
        Ok(self.slice(first, self.at).into())
    }

    /// The members of a structure, and their C text.
    fn members(&mut self) -> Res<(Vec<Field>, String)> {
        self.enter()?;
        let (mut text, mut copied) = (String::new(), self.token().start);
        self.expect("{")?;
        let mut fields = Vec::new();
        while !self.is("}") {
            if self.accept(";") {
                continue;
            }
            let first = self.at;
            let from = self.token().start;
            if self.is("_Static_assert") {
                self.at += 1;
                self.skip_brackets()?;
                self.expect(";")?;
                continue;
            }
            let spec = self.specifiers()?;
            if spec.is_implicit {
                return Err(self.error_at(first, "expected a declaration of a member"));
            }
            let declared = self.member_declarators(&spec, &mut fields)?;
            self.expect(";")?;
            text.push_str(&self.src[copied..from]);
            text.push_str(&self.member_text(&spec, &declared));
            copied = self.previous_end();
        }
        self.expect("}")?;
        text.push_str(&self.src[copied..self.previous_end()]);
        self.depth -= 1;
        Ok((fields, text))
    }

    fn member_declarators(
        &mut self,
        spec: &Spec,
        fields: &mut Vec<Field>,
    ) -> Res<Vec<(Declared, String)>> {
        let mut declared = Vec::new();
        if self.is(";") {
            // Members of an anonymous structure are members of the outer one.
            fields.push(Field { name: String::new(), ty: spec.ty.clone(), is_bits: false });
            return Ok(declared);
        }
        loop {
            let first = self.at;
            let mut one = match self.is(":") {
                true => Declared {
                    name: String::new(),
                    ty: spec.ty.clone(),
                    first,
                    end: first,
                    old_style: None,
                },
                false => self.declarator(spec.ty.clone(), false)?,
            };
            let mut bits = String::new();
            let is_bits = self.accept(":");
            if is_bits {
                let width = self.conditional()?;
                bits = format!(" : {}", self.text(&width));
            }
            self.skip_attributes()?;
            one.end = self.at;
            if matches!(one.ty, Ty::Spread(..)) {
                return Err(self.error_at(first, "a spread array cannot be a member"));
            }
            fields.push(Field { name: one.name.clone(), ty: one.ty.clone(), is_bits });
            declared.push((one, bits));
            if !self.accept(",") {
                return Ok(declared);
            }
        }
    }

    fn member_text(&self, spec: &Spec, declared: &[(Declared, String)]) -> String {
        if !declared.iter().any(|(one, _)| one.ty.mentions_global()) {
            let first = declared.first().map(|(one, _)| one.first);
            let last = declared.last().map(|(one, _)| one.end);
            let rest = first.zip(last).map_or("", |(first, last)| self.slice(first, last));
            return format!("{} {rest};", spec.text);
        }
        let mut text = spec.definition.iter().map(|text| format!("{text}; ")).collect::<String>();
        for (one, bits) in declared {
            text.push_str(&format!("{}{bits}; ", self.declare(&one.ty, &one.name)));
        }
        text
    }

    /// Finds a member, also in anonymous ones: its type, and whether it is a bit-field.
    pub(super) fn field(&self, number: usize, name: &str) -> Option<(Ty, bool)> {
        let fields = self.structs[number].fields.as_ref()?;
        fields.iter().find_map(|field| match (&field.name[..], field.ty.bare()) {
            ("", Ty::Struct(inner)) => self.field(*inner, name),
            (found, _) if found == name => Some((field.ty.clone(), field.is_bits)),
            _ => None,
        })
    }

    /// Opens a scope.
    pub(super) fn push_scope(&mut self) {
        self.scopes.push(HashMap::new());
        self.tags.push(HashMap::new());
    }

    /// Closes it.
    pub(super) fn pop_scope(&mut self) {
        self.scopes.pop();
        self.tags.pop();
    }
}
