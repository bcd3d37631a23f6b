//! Calls, and those that the language knows.

use super::{Expr, Parser, Place, Res};
use crate::lex::Kind;
use crate::types::{Reach, Ty};

impl Parser<'_> {
    /// A call; its callee is parsed.
    pub(super) fn call(&mut self, first: usize, callee: Expr) -> Res<Expr> {
        let open = self.at;
        self.at += 1;
        let outer = std::mem::replace(&mut self.colon_operators, true);
        let mut args = Vec::new();
        while !self.is(")") {
            args.push(self.assignment()?);
            if !self.accept(",") {
                break;
            }
        }
        self.colon_operators = outer;
        self.expect(")")?;
        let name = match (self.tokens.list[first].kind, open - first) {
            (Kind::Name, 1) => self.text_of(first).to_owned(),
            _ => String::new(),
        };
        if let Some(known) = self.known_call(first, &name, &args)? {
            return Ok(known);
        }
        let callee = self.value(callee)?;
        let func = match callee.ty.bare() {
            Ty::Func(func) => Some(func.clone()),
            _ => match callee.ty.target().map(Ty::bare) {
                Some(Ty::Func(func)) => Some(func.clone()),
                _ => None,
            },
        };
        if callee.ty.is_global() {
            return Err(self.error_at(first, "functions are not in the global memory"));
        }
        let params = func.as_ref().and_then(|func| func.params.as_deref()).unwrap_or_default();
        let mut parts = vec![callee.clone()];
        for (number, arg) in args.into_iter().enumerate() {
            parts.push(match params.get(number) {
                Some((_, ty)) => self.converted(arg, ty)?,
                None => self.value(arg)?,
            });
        }
        let text = self.compose(first, self.at, &parts.iter().collect::<Vec<_>>());
        let ty = func.map_or(Ty::Unknown, |func| func.ret.clone());
        Ok(self.expr(first, ty, text))
    }

    /// What the language has as operators in the form of calls.
    fn known_call(&mut self, first: usize, name: &str, args: &[Expr]) -> Res<Option<Expr>> {
        let wants = match name {
            "tolocal" | "toproc" | "tospread" => 1..=1,
            "toglobal" => 2..=2,
            "atomic" | "i_atomic" | "d_atomic" => 2..=6,
            _ => return Ok(None),
        };
        if !wants.contains(&args.len()) {
            return Err(self.error_at(first, format!("'{name}' has a wrong number of arguments")));
        }
        let takes_pointer = ["tolocal", "toproc", "tospread"].contains(&name);
        let value = |arg: &Expr| match takes_pointer {
            true => self.pointer(arg.clone()),
            false => self.value(arg.clone()),
        };
        let args = args.iter().map(value).collect::<Res<Vec<_>>>()?;
        if name.ends_with("atomic") {
            return self.atomic(first, name, &args).map(Some);
        }
        let last = &args[args.len() - 1];
        let to = match last.ty.bare() {
            Ty::Spread(_, block) => (**block).clone(),
            ty => ty.target().cloned().unwrap_or(Ty::Void),
        };
        let Some(reach) = last.ty.reach() else {
            return Err(self.error_at(first, format!("'{name}' takes a pointer")));
        };
        let global = match reach {
            Reach::Local => format!("quipu_gp_here({})", self.text(last)),
            _ => self.global_text(last),
        };
        let (ty, text) = match name {
            "tolocal" => {
                let ty = Ty::local_ptr(to);
                let name = self.declare(&ty, "");
                (ty, format!("(({name})quipu_gp_local({global}))"))
            }
            "toproc" => (Ty::int(), format!("quipu_gp_proc({global})")),
            "tospread" => (Ty::spread_ptr(to), format!("quipu_sp_of_gp({global})")),
            _ => {
                let proc = self.text(&args[0]);
                (Ty::global_ptr(to), format!("quipu_gp_make({proc}, quipu_gp_local({global}))"))
            }
        };
        Ok(Some(self.expr(first, ty, Some(text))))
    }

    /// The value of an argument; of a number or structure in remote memory, its address.
    fn pointer(&mut self, arg: Expr) -> Res<Expr> {
        match &arg.place {
            Place::Remote { addr, .. } if arg.ty.reach().is_none() => {
                let (ty, text) = (Ty::global_ptr(arg.ty.clone()), Some(addr.clone()));
                Ok(Expr { ty, text, place: Place::Here, ..arg })
            }
            _ => self.value(arg),
        }
    }

    /// `atomic(f, g, numbers...)`: runs `f(local g, numbers...)` at the owner of `g`.
    fn atomic(&mut self, first: usize, name: &str, args: &[Expr]) -> Res<Expr> {
        if !args[1].ty.is_global() {
            return Err(self
                .error_at(first, format!("the second argument of '{name}' is a global pointer")));
        }
        let function = match args[0].ty.bare() {
            Ty::Func(func) => Some(func.clone()),
            _ => match args[0].ty.target().map(Ty::bare) {
                Some(Ty::Func(func)) => Some(func.clone()),
                _ => None,
            },
        };
        let Some(function) = function else {
            return Err(
                self.error_at(first, format!("the first argument of '{name}' is a function"))
            );
        };
        let params = function.params.as_deref().unwrap_or_default();
        let mut numbers = Vec::new();
        for arg in &args[2..] {
            if !arg.ty.is_number() || arg.ty.is_floating() {
                let why = format!("the function of '{name}' takes integers after the pointer");
                return Err(self.error_at(arg.first, why));
            }
            numbers.push(format!("(long)({})", self.text(arg)));
        }
        if params.iter().skip(1).any(|(_, ty)| !ty.is_number() || ty.is_floating()) {
            let why = format!("the function of '{name}' takes integers after the pointer");
            return Err(self.error_at(first, why));
        }
        let wrong = match name {
            "atomic" => false,
            "i_atomic" => function.ret.is_floating() || !function.ret.is_number(),
            _ => !matches!(function.ret.bare(), Ty::Arith(name) if &**name == "double"),
        };
        if wrong {
            return Err(
                self.error_at(first, format!("the function of '{name}' returns another type"))
            );
        }
        let (what, ty) = match name {
            "atomic" => ("quipu_sc_atomic", Ty::Void),
            "i_atomic" => ("quipu_sc_atomic_int", Ty::int()),
            _ => ("quipu_sc_atomic_double", Ty::arith("double")),
        };
        numbers.resize(4, "0L".to_owned());
        let text = format!(
            "{what}((void (*)())({}), {}, {})",
            self.text(&args[0]),
            self.global_text(&args[1]),
            numbers.join(", ")
        );
        Ok(self.expr(first, ty, Some(text)))
    }
}
