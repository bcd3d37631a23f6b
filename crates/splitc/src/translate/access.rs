//! Reads, writes, gets, puts and stores.

use super::{Expr, Parser, Place, Res};
use crate::types::{Reach, Ty};

impl Parser<'_> {
    /// The value of an expression: what is in remote memory is read, and arrays become pointers.
    pub(super) fn value(&mut self, expr: Expr) -> Res<Expr> {
        let Place::Remote { addr, .. } = &expr.place else { return Ok(expr) };
        if let Ty::Array(of, _) = expr.ty.bare() {
            let (ty, text) = (Ty::global_ptr((**of).clone()), Some(addr.clone()));
            return Ok(Expr { ty, text, place: Place::Here, ..expr });
        }
        self.must_know(expr.first, &expr.ty)?;
        let name = self.fresh("t");
        let variable = self.declare(expr.ty.unqualified(), &name);
        let read = super::Read { variable, name: name.clone(), addr: addr.clone() };
        Ok(Expr { text: Some(name), place: Place::Here, reads: vec![read], ..expr })
    }

    /// `left = right` and its relatives.
    pub(super) fn assign(
        &mut self,
        first: usize,
        left: Expr,
        operator: &str,
        right: Expr,
    ) -> Res<Expr> {
        let Place::Remote { addr, .. } = left.place.clone() else {
            return self.assign_here(first, left, operator, right);
        };
        self.must_be_variable(first, &left.ty)?;
        let ty = left.ty.unqualified().clone();
        let (to, value) = (self.fresh("a"), self.fresh("t"));
        let variable = self.declare(&ty, &value);
        let write = format!("quipu_sc_write({to}, &{value}, sizeof {value}); {value}; }})");
        let text = if operator == "=" {
            let right = self.converted(right, &ty)?;
            let right = self.text(&right);
            format!("({{ quipu_gp {to} = {addr}; {variable} = {right}; {write}")
        } else {
            let change = self.changed(first, &value, &ty, operator, right)?;
            let read = format!("quipu_sc_read(&{value}, {to}, sizeof {value});");
            format!("({{ quipu_gp {to} = {addr}; {variable}; {read} {change}; {write}")
        };
        Ok(self.expr(first, ty, Some(text)))
    }

    /// The C text of `variable operator right`.
    fn changed(
        &mut self,
        at: usize,
        variable: &str,
        ty: &Ty,
        operator: &str,
        right: Expr,
    ) -> Res<String> {
        let right = self.value(right)?;
        let text = self.text(&right);
        if right.ty.reach().is_some() {
            return Err(self.error_at(at, format!("'{operator}' takes no pointer on its right")));
        }
        if !ty.is_global() {
            return Ok(format!("{variable} {operator} ({text})"));
        }
        let index = match operator {
            "+=" => format!("(long)({text})"),
            "-=" => format!("-(long)({text})"),
            _ => return Err(self.error_at(at, format!("'{operator}' takes no global pointer"))),
        };
        Ok(self.moved(variable, ty, &index, false))
    }

    fn assign_here(&mut self, first: usize, left: Expr, operator: &str, right: Expr) -> Res<Expr> {
        if matches!(left.ty.bare(), Ty::Spread(..)) {
            return Err(self.error_at(first, "a spread array cannot be assigned to"));
        }
        let ty = left.ty.clone();
        if operator != "=" && ty.is_global() {
            let lvalue = self.text(&left);
            let text = self.changed(first, &lvalue, &ty, operator, right)?;
            return Ok(self.expr(first, ty, Some(text)));
        }
        let right = self.converted(right, &ty)?;
        let text = self.compose(first, self.at, &[&left, &right]);
        Ok(self.expr(first, ty, text))
    }

    /// `++x`, `--x`, and with `is_pre` false `x++`, `x--`.
    pub(super) fn step(
        &mut self,
        first: usize,
        operand: Expr,
        operator: &str,
        is_pre: bool,
    ) -> Res<Expr> {
        let ty = operand.ty.unqualified().clone();
        let by = if operator == "++" { "1L" } else { "-1L" };
        let Place::Remote { addr, .. } = operand.place.clone() else {
            if matches!(ty.bare(), Ty::Spread(..)) {
                return Err(self.error_at(first, "a spread array cannot be changed"));
            }
            let text = match ty.is_global() {
                true => Some(self.moved(&self.text(&operand), &ty, by, !is_pre)),
                false => self.compose(first, self.at, &[&operand]),
            };
            return Ok(self.expr(first, ty, text));
        };
        self.must_be_variable(first, &ty)?;
        let (at, old, new) = (self.fresh("a"), self.fresh("t"), self.fresh("t"));
        let change = match ty.is_global() {
            true => self.moved(&new, &ty, by, false),
            false => format!("{operator}{new}"),
        };
        let result = if is_pre { &new } else { &old };
        let text = format!(
            "({{ quipu_gp {at} = {addr}; {}; quipu_sc_read(&{old}, {at}, sizeof {old}); {} = {old}; {change}; \
             quipu_sc_write({at}, &{new}, sizeof {new}); {result}; }})",
            self.declare(&ty, &old),
            self.declare(&ty, &new),
        );
        Ok(self.expr(first, ty, Some(text)))
    }

    fn must_be_variable(&self, at: usize, ty: &Ty) -> Res<()> {
        self.must_know(at, ty)?;
        match ty.bare() {
            Ty::Array(..) => {
                Err(self.error_at(at, "an array cannot be assigned to; use bulk_write"))
            }
            _ => Ok(()),
        }
    }

    /// `left := right` and `left :- right`.
    pub(super) fn split_phase(
        &mut self,
        first: usize,
        left: Expr,
        operator: char,
        right: Expr,
    ) -> Res<Expr> {
        let text = match (left.place.clone(), right.place.clone(), operator == '-') {
            (Place::Here, Place::Remote { addr, .. }, false) => {
                let (to, from) = (left.ty.unqualified().clone(), right.ty.unqualified().clone());
                self.must_be_variable(first, &from)?;
                if self.same_size(&to, &from) {
                    let left = self.text(&left);
                    format!("quipu_sc_get(&({left}), {addr}, sizeof({}))", self.declare(&from, ""))
                } else {
                    let why =
                        "both sides of a get have the same type: C would have to convert the value";
                    return Err(self.error_at(first, why));
                }
            }
            (Place::Here, _, true) => {
                self.must_be_variable(first, &left.ty)?;
                let addr = format!("quipu_gp_here(&({}))", self.text(&left));
                self.sent("store", &addr, &left.ty, right)?
            }
            (Place::Here, Place::Here, false) => {
                self.must_be_variable(first, &left.ty)?;
                let right = self.converted(right, &left.ty.clone())?;
                format!("(void)({} = ({}))", self.text(&left), self.text(&right))
            }
            (Place::Remote { addr, .. }, ..) => {
                self.must_be_variable(first, &left.ty)?;
                let what = if operator == '=' { "put" } else { "store" };
                self.sent(what, &addr, &left.ty, right)?
            }
        };
        Ok(self.expr(first, Ty::Void, Some(text)))
    }

    /// The C text that evaluates a value and sends it.
    fn sent(&mut self, what: &str, addr: &str, ty: &Ty, right: Expr) -> Res<String> {
        let ty = ty.unqualified().clone();
        let right = self.converted(right, &ty)?;
        let (to, value) = (self.fresh("a"), self.fresh("t"));
        let variable = self.declare(&ty, &value);
        let right = self.text(&right);
        Ok(format!(
            "({{ quipu_gp {to} = {addr}; {variable} = {right}; quipu_sc_{what}({to}, &{value}, sizeof {value}); }})"
        ))
    }

    /// Whether values of one type may be copied to a variable of the other.
    fn same_size(&self, to: &Ty, from: &Ty) -> bool {
        let pointer = |ty: &Ty| ty.reach().unwrap_or(Reach::Local);
        match (to.bare(), from.bare()) {
            (Ty::Arith(to), Ty::Arith(from)) => kind(to) == kind(from),
            (Ty::Struct(to), Ty::Struct(from)) => to == from,
            (Ty::Ptr(..), Ty::Ptr(..)) => pointer(to) == pointer(from),
            (Ty::Enum(_), Ty::Enum(_)) => true,
            (Ty::Enum(_), Ty::Arith(name)) | (Ty::Arith(name), Ty::Enum(_)) => kind(name) == "int",
            _ => false,
        }
    }
}

/// The representation of an arithmetic type: signed and unsigned are one.
fn kind(name: &str) -> &'static str {
    let has = |word: &str| name.split(' ').any(|found| found == word);
    match () {
        () if has("double") && has("long") => "long double",
        () if has("double") => "double",
        () if has("float") => "float",
        () if has("char") => "char",
        () if has("short") => "short",
        () if has("long") => "long",
        () if has("_Bool") => "_Bool",
        () => "int",
    }
}
