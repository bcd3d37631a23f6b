//! Expressions that name a place: members, pointers, elements of arrays, addresses.

use std::rc::Rc;

use crate::translate::{Expr, Parser, Place, Res};
use crate::types::{Reach, Ty};

impl Parser<'_> {
    /// A member.
    pub(super) fn member(
        &mut self,
        first: usize,
        base: Expr,
        arrow: bool,
        name: &str,
    ) -> Res<Expr> {
        let base = if arrow { self.value(base)? } else { base };
        let of = match (arrow, base.ty.bare()) {
            (true, _) => base.ty.target().cloned().unwrap_or(Ty::Unknown),
            (false, ty) => ty.clone(),
        };
        let found = match of.bare() {
            Ty::Struct(number) => self.field(*number, name),
            _ => None,
        };
        let addr = match &base.place {
            Place::Remote { addr, .. } => Some(addr.clone()),
            Place::Here if arrow && base.ty.is_global() => Some(self.global_text(&base)),
            Place::Here => None,
        };
        let Some(addr) = addr else {
            let text = self.compose(first, self.at, &[&base]);
            return Ok(self.expr(first, found.map_or(Ty::Unknown, |(ty, _)| ty), text));
        };
        let Some((ty, is_bits)) = found else {
            return Err(
                self.error(format!("the structure has no member '{name}' that is known here"))
            );
        };
        if is_bits {
            let why = format!(
                "'{name}' is a bit-field; bit-fields cannot be accessed through global pointers"
            );
            return Err(self.error_at(first, why));
        }
        let of = self.declare(of.unqualified(), "");
        let addr = format!("quipu_gp_add({addr}, __builtin_offsetof({of}, {name}))");
        Ok(Expr { place: Place::Remote { addr, spread: None }, ..self.expr(first, ty, None) })
    }

    /// `*p`.
    pub(super) fn dereference(&mut self, first: usize, operand: Expr) -> Res<Expr> {
        let operand = self.value(operand)?;
        if let Ty::Func(_) = operand.ty.bare() {
            let text = self.compose(first, self.at, &[&operand]);
            return Ok(self.expr(first, operand.ty, text));
        }
        let to = operand.ty.target().cloned().unwrap_or(Ty::Unknown);
        if !operand.ty.is_global() {
            let text = self.compose(first, self.at, &[&operand]);
            return Ok(self.expr(first, to, text));
        }
        let spread = (operand.ty.reach() == Some(Reach::Spread)).then(|| self.text(&operand));
        let place = Place::Remote { addr: self.global_text(&operand), spread };
        Ok(Expr { place, ..self.expr(first, to, None) })
    }

    /// `&x`.
    pub(super) fn address(&mut self, first: usize, operand: Expr) -> Res<Expr> {
        match &operand.place {
            Place::Remote { spread: Some(spread), .. } => {
                let text = Some(spread.clone());
                Ok(self.expr(first, Ty::spread_ptr(operand.ty), text))
            }
            Place::Remote { addr, .. } => {
                let text = Some(addr.clone());
                Ok(self.expr(first, Ty::global_ptr(operand.ty), text))
            }
            Place::Here if matches!(operand.ty.bare(), Ty::Spread(..)) => Err(self.error_at(
                first,
                "the address of a whole spread array cannot be taken; use its name",
            )),
            Place::Here => {
                let text = self.compose(first, self.at, &[&operand]);
                Ok(self.expr(first, Ty::local_ptr(operand.ty), text))
            }
        }
    }

    /// `a[i]`, of any kind of pointer or array.
    pub(super) fn index(&mut self, first: usize, base: Expr, index: Expr) -> Res<Expr> {
        if index.ty.reach().is_some() && !base.ty.is_global() {
            // `i[a]`.
            if base.ty.reach().is_none() && index.ty.is_global() {
                return Err(self.error_at(first, "write a global pointer in front of its index"));
            }
            if base.ty.reach().is_none() {
                let to = index.ty.target().cloned().unwrap_or(Ty::Unknown);
                let text = self.compose(first, self.at, &[&base, &index]);
                return Ok(self.expr(first, to, text));
            }
        }
        if let (Place::Here, Ty::Spread(sizes, block)) = (&base.place, base.ty.bare().clone()) {
            return self.index_spread(first, &base, &sizes, &block, &index);
        }
        let base = self.value(base)?;
        let to = base.ty.target().cloned().unwrap_or(Ty::Unknown);
        if !base.ty.is_global() {
            let text = self.compose(first, self.at, &[&base, &index]);
            return Ok(self.expr(first, to, text));
        }
        self.must_know(first, &to)?;
        let sum = self.offset(&base, &self.text(&index), "");
        let (addr, spread) = match base.ty.reach() {
            Some(Reach::Spread) => (format!("quipu_gp_of_sp({sum})"), Some(sum)),
            _ => (sum, None),
        };
        Ok(Expr { place: Place::Remote { addr, spread }, ..self.expr(first, to, None) })
    }

    /// `A[i]` of a spread array: a smaller one, or a block.
    fn index_spread(
        &mut self,
        first: usize,
        base: &Expr,
        sizes: &[Rc<str>],
        block: &Rc<Ty>,
        index: &Expr,
    ) -> Res<Expr> {
        self.must_know(first, block)?;
        let rest = &sizes[1..];
        let blocks: String = rest.iter().map(|size| format!(" * (long)({size})")).collect();
        let (text, index) = (self.text(base), self.text(index));
        let size = self.declare(block, "");
        let sum = format!("quipu_sp_add({text}, (long)({index}){blocks}, sizeof({size}))");
        if !rest.is_empty() {
            let ty = Ty::Spread(rest.into(), block.clone());
            return Ok(self.expr(first, ty, Some(sum)));
        }
        let place = Place::Remote { addr: format!("quipu_gp_of_sp({sum})"), spread: Some(sum) };
        Ok(Expr { place, ..self.expr(first, (**block).clone(), None) })
    }
}
