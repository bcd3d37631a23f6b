//! Arithmetic, comparison and conversion of global and spread pointers.

use super::{Expr, Parser, Place, Res};
use crate::types::{Reach, Ty};

impl Parser<'_> {
    /// Refuses a type that the translator does not follow, where its size matters.
    pub(super) fn must_know(&self, at: usize, ty: &Ty) -> Res<()> {
        match ty.bare() {
            Ty::Void => {
                Err(self
                    .error_at(at, "a global pointer to void has to be cast before it is used so"))
            }
            Ty::Func(_) => Err(self.error_at(at, "functions are not in the global memory")),
            _ if !ty.is_known() => {
                Err(self.error_at(at, "the type of this expression is not understood"))
            }
            _ => Ok(()),
        }
    }

    /// The text of a global or spread pointer, as a global one.
    pub(super) fn global_text(&self, pointer: &Expr) -> String {
        let text = self.text(pointer);
        match pointer.ty.reach() {
            Some(Reach::Spread) => format!("quipu_gp_of_sp({text})"),
            _ => text,
        }
    }

    /// `sizeof` of what a pointer points to.
    fn step_size(&self, ty: &Ty) -> String {
        match ty.bare() {
            Ty::Spread(_, block) => format!("sizeof({})", self.declare(block, "")),
            _ => match ty.target().map(|to| (to, to.bare())) {
                None | Some((_, Ty::Void)) => "1".into(),
                Some((to, _)) => format!("sizeof({})", self.declare(to.unqualified(), "")),
            },
        }
    }

    /// A pointer plus (or, with `-`, minus) an index.
    pub(super) fn offset(&self, pointer: &Expr, index: &str, sign: &str) -> String {
        let (text, size) = (self.text(pointer), self.step_size(&pointer.ty));
        match pointer.ty.reach() {
            Some(Reach::Spread) => format!("quipu_sp_add({text}, {sign}(long)({index}), {size})"),
            _ => format!("quipu_gp_add({text}, {sign}(long)({index}) * (long){size})"),
        }
    }

    /// The type that two pointers are compared in, or the arms of a conditional have.
    pub(super) fn common(&self, left: &Expr, right: &Expr) -> Ty {
        let is_global = |ty: &Ty| ty.reach() == Some(Reach::Global);
        let is_spread = |ty: &Ty| ty.reach() == Some(Reach::Spread);
        let pointer = |ty: &Ty| match ty.bare() {
            Ty::Spread(_, block) => Ty::spread_ptr((**block).clone()),
            _ => ty.clone(),
        };
        let to = |ty: &Ty| pointer(ty).target().cloned().unwrap_or(Ty::Void);
        match () {
            () if is_global(&left.ty) => left.ty.clone(),
            () if is_global(&right.ty) => right.ty.clone(),
            () if is_spread(&left.ty) && (is_spread(&right.ty) || self.is_null(right)) => {
                pointer(&left.ty)
            }
            () if is_spread(&right.ty) && self.is_null(left) => pointer(&right.ty),
            () if is_spread(&left.ty) => Ty::global_ptr(to(&left.ty)),
            () => Ty::global_ptr(to(&right.ty)),
        }
    }

    /// An operator of which one operand is a global or spread pointer.
    pub(super) fn operate_pointers(
        &mut self,
        first: usize,
        left: Expr,
        operator: &str,
        right: Expr,
    ) -> Res<Expr> {
        match operator {
            "==" | "!=" | "<" | ">" | "<=" | ">=" => self.compare(first, left, operator, right),
            "+" if left.ty.is_global() => self.add(first, &left, &right, ""),
            "+" => self.add(first, &right, &left, ""),
            "-" if right.ty.reach().is_some() => {
                let ty = self.common(&left, &right);
                let size = self.step_size(&ty);
                let kind = if ty.reach() == Some(Reach::Spread) { "sp" } else { "gp" };
                let (left, right) = (self.converted(left, &ty)?, self.converted(right, &ty)?);
                let (left, right) = (self.text(&left), self.text(&right));
                let text = format!("quipu_{kind}_diff({left}, {right}, {size})");
                Ok(self.expr(first, Ty::arith("long"), Some(text)))
            }
            "-" => self.add(first, &left, &right, "-"),
            _ => Err(self.error_at(first, format!("'{operator}' takes no global pointer"))),
        }
    }

    fn add(&mut self, first: usize, pointer: &Expr, index: &Expr, sign: &str) -> Res<Expr> {
        if index.ty.reach().is_some() {
            return Err(self.error_at(first, "two pointers cannot be added"));
        }
        let ty = match pointer.ty.bare() {
            Ty::Spread(sizes, block) if sizes.len() == 1 => Ty::spread_ptr((**block).clone()),
            Ty::Spread(..) => {
                return Err(self.error_at(
                    first,
                    "arithmetic on a spread array of several dimensions; index it",
                ));
            }
            _ => pointer.ty.clone(),
        };
        if !matches!(ty.target().map(Ty::bare), Some(Ty::Void)) {
            self.must_know(first, ty.target().unwrap_or(&Ty::Unknown))?;
        }
        let text = self.offset(pointer, &self.text(index), sign);
        Ok(self.expr(first, ty, Some(text)))
    }

    fn compare(&mut self, first: usize, left: Expr, operator: &str, right: Expr) -> Res<Expr> {
        let ty = self.common(&left, &right);
        let kind = if ty.reach() == Some(Reach::Spread) { "sp" } else { "gp" };
        let (left, right) = (self.converted(left, &ty)?, self.converted(right, &ty)?);
        let (left, right) = (self.text(&left), self.text(&right));
        let text = match operator {
            "==" => format!("quipu_{kind}_equal({left}, {right})"),
            "!=" => format!("(!quipu_{kind}_equal({left}, {right}))"),
            _ => format!("(quipu_{kind}_order({left}, {right}) {operator} 0)"),
        };
        Ok(self.expr(first, Ty::int(), Some(text)))
    }

    /// Whether it is a constant 0, with casts to `void *` and parentheses around it.
    pub(super) fn is_null(&self, expr: &Expr) -> bool {
        let words = (expr.first..expr.end).map(|index| self.text_of(index));
        let words: Vec<&str> =
            words.filter(|word| !["(", ")", "void", "*", "char"].contains(word)).collect();
        expr.text.is_none() && matches!(words[..], ["0" | "0L" | "0l" | "0UL"])
    }

    /// A condition.
    pub(super) fn truth(&mut self, expr: Expr) -> Res<Expr> {
        let expr = self.value(expr)?;
        let kind = match expr.ty.reach() {
            Some(Reach::Global) => "gp",
            Some(Reach::Spread) => "sp",
            _ => return Ok(expr),
        };
        let text = format!("quipu_{kind}_true({})", self.text(&expr));
        Ok(Expr { ty: Ty::int(), text: Some(text), reads: Vec::new(), ..expr })
    }

    /// A value, converted to a type as by assignment.
    pub(super) fn converted(&mut self, expr: Expr, to: &Ty) -> Res<Expr> {
        let expr = self.value(expr)?;
        // The headers of the language use the structures themselves.
        if is_structure(to) || is_structure(&expr.ty) {
            return Ok(expr);
        }
        let text = self.text(&expr);
        let (from, wanted) = (expr.ty.reach(), to.reach());
        let text = match (wanted, from) {
            (Some(Reach::Global), Some(Reach::Global))
            | (Some(Reach::Spread), Some(Reach::Spread)) => {
                return Ok(expr);
            }
            (Some(Reach::Global), _) if self.is_null(&expr) => "((quipu_gp){0})".into(),
            (Some(Reach::Spread), _) if self.is_null(&expr) => "((quipu_sp){0})".into(),
            (Some(Reach::Global), Some(Reach::Spread)) => format!("quipu_gp_of_sp({text})"),
            (Some(Reach::Global), Some(Reach::Local)) => format!("quipu_gp_here({text})"),
            (Some(Reach::Global | Reach::Spread), _) if matches!(expr.ty.bare(), Ty::Unknown) => {
                return Ok(expr);
            }
            (Some(Reach::Global), None) => {
                return Err(
                    self.error_at(expr.first, "a number is no global pointer; use toglobal")
                );
            }
            (Some(Reach::Spread), _) => {
                let why = "only a spread pointer, or a cast, becomes a spread pointer";
                return Err(self.error_at(expr.first, why));
            }
            (_, Some(Reach::Global | Reach::Spread)) if !matches!(to.bare(), Ty::Unknown) => {
                let why =
                    "a global pointer does not become a local one by itself; use tolocal or a cast";
                return Err(self.error_at(expr.first, why));
            }
            _ => return Ok(expr),
        };
        Ok(Expr { ty: to.clone(), text: Some(text), reads: Vec::new(), ..expr })
    }

    /// `(type) x`; `name` is the C text of the type.
    pub(super) fn cast(&mut self, first: usize, to: &Ty, name: &str, operand: Expr) -> Res<Expr> {
        let operand = self.value(operand)?;
        let text = self.text(&operand);
        let text = match (to.reach(), operand.ty.reach()) {
            (Some(Reach::Global), Some(Reach::Global))
            | (Some(Reach::Spread), Some(Reach::Spread)) => {
                format!("({text})")
            }
            (Some(Reach::Spread), Some(Reach::Global)) => format!("quipu_sp_of_gp({text})"),
            (Some(Reach::Spread), Some(Reach::Local)) if !self.is_null(&operand) => {
                format!("quipu_sp_of_gp(quipu_gp_here({text}))")
            }
            (Some(Reach::Global | Reach::Spread), _) => {
                let converted = self.converted(operand, to)?;
                self.text(&converted)
            }
            (Some(Reach::Local), Some(Reach::Global)) => {
                format!("(({name})quipu_gp_local({text}))")
            }
            (Some(Reach::Local), Some(Reach::Spread)) => {
                format!("(({name})quipu_gp_local(quipu_gp_of_sp({text})))")
            }
            (_, Some(Reach::Global | Reach::Spread)) if !matches!(to.bare(), Ty::Void) => {
                return Err(self.error_at(first, "a global pointer cannot be cast to a number"));
            }
            _ => {
                let written = self.slice(first + 1, operand.first - 1) == name;
                let text =
                    (operand.text.is_some() || !written).then(|| format!("({name})({text})"));
                return Ok(self.expr(first, to.clone(), text));
            }
        };
        Ok(self.expr(first, to.clone(), Some(text)))
    }

    /// The C text that adds to a pointer variable, or steps it; `lvalue` is an expression of C.
    pub(super) fn moved(&self, lvalue: &str, ty: &Ty, index: &str, is_post: bool) -> String {
        let size = self.step_size(ty);
        let when = if is_post { "post" } else { "pre" };
        match ty.reach() {
            Some(Reach::Spread) => format!("quipu_sp_{when}(&({lvalue}), {index}, {size})"),
            _ => format!("quipu_gp_{when}(&({lvalue}), ({index}) * (long){size})"),
        }
    }

    /// Whether the expression is in the memory of some process.
    pub(super) fn is_remote(expr: &Expr) -> bool {
        matches!(expr.place, Place::Remote { .. })
    }
}

/// Whether it is one of the structures that stand for pointers.
fn is_structure(ty: &Ty) -> bool {
    matches!(ty.unqualified(), Ty::Named(name, _) if matches!(&**name, "quipu_gp" | "quipu_sp"))
}
