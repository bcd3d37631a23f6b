//! Initialisers.

use super::{Expr, Parser, Res};
use crate::types::Ty;

impl Parser<'_> {
    /// An initialiser for something of a type.
    pub(super) fn initializer(&mut self, ty: &Ty) -> Res<Expr> {
        if !self.is("{") {
            let first = self.at;
            let value = self.assignment()?;
            if let (Ty::Array(..), true) = (ty.bare(), value.text.is_none()) {
                return Ok(value);
            }
            let value = self.converted(value, ty)?;
            let text = value.text.is_some().then(|| self.text(&value));
            return Ok(Expr { first, ..self.expr(first, ty.clone(), text) });
        }
        self.enter()?;
        let first = self.at;
        self.at += 1;
        let (mut parts, mut position) = (Vec::new(), 0);
        while !self.is("}") {
            let element = self.designated(ty, &mut position)?;
            let part = self.initializer(&element)?;
            parts.push(part);
            position += 1;
            if !self.accept(",") {
                break;
            }
        }
        self.expect("}")?;
        self.depth -= 1;
        let text = self.compose(first, self.at, &parts.iter().collect::<Vec<_>>());
        Ok(self.expr(first, ty.clone(), text))
    }

    /// Designators, if there are any; the type of what is initialised next.
    fn designated(&mut self, ty: &Ty, position: &mut usize) -> Res<Ty> {
        let mut element = self.element(ty, *position);
        let mut is_first = true;
        loop {
            if self.is("[") {
                self.skip_brackets()?;
                let of = if is_first { ty } else { &element };
                element = of.target().cloned().unwrap_or(Ty::Unknown);
            } else if self.is(".") {
                let name = self.peek(1).to_owned();
                self.at += 2;
                let of = if is_first { ty.clone() } else { element };
                let Ty::Struct(number) = *of.bare() else { return Ok(Ty::Unknown) };
                element = self.field(number, &name).map_or(Ty::Unknown, |(ty, _)| ty);
                if is_first && let Some(fields) = &self.structs[number].fields {
                    *position =
                        fields.iter().position(|field| field.name == name).unwrap_or(*position);
                }
            } else if !is_first {
                self.accept("=");
                return Ok(element);
            } else if self.peek(1) == ":" {
                // GNU's old form: `name: value`.
                let name = self.text_of(self.at).to_owned();
                self.at += 2;
                let Ty::Struct(number) = *ty.bare() else { return Ok(Ty::Unknown) };
                return Ok(self.field(number, &name).map_or(Ty::Unknown, |(ty, _)| ty));
            } else {
                return Ok(element);
            }
            is_first = false;
        }
    }

    /// What an initialiser in braces has at a position. In arrays and structures whose inner braces are left
    /// out positions are not followed: nothing global may be there.
    fn element(&self, ty: &Ty, position: usize) -> Ty {
        let element = match ty.bare() {
            Ty::Array(of, _) => (**of).clone(),
            Ty::Struct(number) => {
                let fields = self.structs[*number].fields.as_deref().unwrap_or_default();
                fields.get(position).map_or(Ty::Unknown, |field| field.ty.clone())
            }
            _ => return ty.clone(),
        };
        let is_whole = matches!(element.bare(), Ty::Array(..) | Ty::Struct(_));
        if is_whole && !self.is("{") && !self.is(".") && !self.is("[") {
            Ty::Unknown
        } else {
            element
        }
    }
}
