//! Types of C and Split-C, and how they are written in C.

use std::rc::Rc;

/// Which memory a pointer refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// That of this process.
    Local,
    /// That of any process; arithmetic stays there.
    Global,
    /// That of any process; arithmetic goes round the processes.
    Spread,
}

/// A type.
#[derive(Clone, Debug)]
pub(crate) enum Ty {
    Void,
    /// An arithmetic type, as C writes it.
    Arith(Rc<str>),
    Ptr(Rc<Ty>, Reach),
    /// An array and the text of its size, if it has one.
    Array(Rc<Ty>, Option<Rc<str>>),
    /// A spread array: the sizes left of `::`, and the type of a block.
    Spread(Rc<[Rc<str>]>, Rc<Ty>),
    Func(Rc<Func>),
    /// A structure or union, by its number.
    Struct(usize),
    Enum(Rc<str>),
    /// A name of a typedef, and what it stands for.
    Named(Rc<str>, Rc<Ty>),
    /// `const`, `volatile` and what they qualify.
    Qualified(Rc<str>, Rc<Ty>),
    /// A type that the translator does not follow. Nothing global comes of it.
    Unknown,
}

#[derive(Debug)]
pub(crate) struct Func {
    pub(crate) ret: Ty,
    /// None in declarations without a prototype.
    pub(crate) params: Option<Vec<(String, Ty)>>,
    pub(crate) variadic: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Field {
    /// Empty for members of anonymous structures, which are found through it.
    pub(crate) name: String,
    pub(crate) ty: Ty,
    pub(crate) is_bits: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Struct {
    pub(crate) keyword: &'static str,
    pub(crate) tag: String,
    pub(crate) fields: Option<Vec<Field>>,
}

impl Ty {
    pub(crate) fn arith(name: &str) -> Self {
        Self::Arith(name.into())
    }

    pub(crate) fn int() -> Self {
        Self::arith("int")
    }

    pub(crate) fn local_ptr(to: Self) -> Self {
        Self::Ptr(Rc::new(to), Reach::Local)
    }

    pub(crate) fn global_ptr(to: Self) -> Self {
        Self::Ptr(Rc::new(to), Reach::Global)
    }

    pub(crate) fn spread_ptr(to: Self) -> Self {
        Self::Ptr(Rc::new(to), Reach::Spread)
    }

    /// Without names and qualifiers in front.
    pub(crate) fn bare(&self) -> &Self {
        let mut ty = self;
        while let Self::Named(_, to) | Self::Qualified(_, to) = ty {
            ty = to;
        }
        ty
    }

    /// Without qualifiers in front, but with its name.
    pub(crate) fn unqualified(&self) -> &Self {
        match self {
            Self::Qualified(_, to) => to.unqualified(),
            other => other,
        }
    }

    /// The reach of a pointer.
    pub(crate) fn reach(&self) -> Option<Reach> {
        match self.bare() {
            Self::Ptr(_, reach) => Some(*reach),
            Self::Spread(..) => Some(Reach::Spread),
            Self::Array(..) | Self::Func(_) => Some(Reach::Local),
            _ => None,
        }
    }

    /// Whether it is a pointer that C does not have.
    pub(crate) fn is_global(&self) -> bool {
        matches!(self.reach(), Some(Reach::Global | Reach::Spread))
    }

    /// Whether it has to be written anew for C.
    pub(crate) fn mentions_global(&self) -> bool {
        match self {
            Self::Ptr(to, reach) => *reach != Reach::Local || to.mentions_global(),
            Self::Array(of, _) => of.mentions_global(),
            Self::Spread(..) => true,
            Self::Func(func) => {
                let params = func.params.iter().flatten();
                func.ret.mentions_global() || params.clone().any(|(_, ty)| ty.mentions_global())
            }
            Self::Qualified(_, to) => to.mentions_global(),
            Self::Void | Self::Arith(_) | Self::Struct(_) | Self::Enum(_) => false,
            Self::Named(..) | Self::Unknown => false,
        }
    }

    /// What a pointer points to, or an array consists of.
    pub(crate) fn target(&self) -> Option<&Self> {
        match self.bare() {
            Self::Ptr(to, _) | Self::Array(to, _) => Some(to),
            _ => None,
        }
    }

    /// Whether it is a number.
    pub(crate) fn is_number(&self) -> bool {
        matches!(self.bare(), Self::Arith(_) | Self::Enum(_))
    }

    /// Whether it is a floating-point number.
    pub(crate) fn is_floating(&self) -> bool {
        let Self::Arith(name) = self.bare() else { return false };
        name.contains("float") || name.contains("double") || name.contains("Float")
    }

    /// Whether C can have variables and values of it.
    pub(crate) fn is_known(&self) -> bool {
        match self {
            Self::Unknown => false,
            Self::Ptr(to, _) | Self::Array(to, _) => to.is_known(),
            Self::Named(..) | Self::Void | Self::Arith(_) | Self::Struct(_) | Self::Enum(_) => true,
            Self::Qualified(_, to) => to.is_known(),
            Self::Spread(_, block) => block.is_known(),
            Self::Func(func) => func.ret.is_known(),
        }
    }
}

/// Writes a declaration of `name` in C. With an empty name it is a type name.
pub(crate) fn declare(structs: &[Struct], ty: &Ty, name: &str) -> String {
    let joined = |base: &str| {
        if name.is_empty() { base.to_owned() } else { format!("{base} {name}") }
    };
    match ty {
        Ty::Void => joined("void"),
        Ty::Arith(base) | Ty::Named(base, _) => joined(base),
        Ty::Enum(tag) => joined(&format!("enum {tag}")),
        Ty::Struct(number) => {
            let of = &structs[*number];
            joined(&format!("{} {}", of.keyword, of.tag))
        }
        Ty::Ptr(_, Reach::Global) => joined("quipu_gp"),
        Ty::Ptr(_, Reach::Spread) | Ty::Spread(..) => joined("quipu_sp"),
        Ty::Ptr(to, Reach::Local) => {
            let inner = match **to {
                Ty::Array(..) | Ty::Func(_) => format!("(*{name})"),
                _ => format!("*{name}"),
            };
            declare(structs, to, &inner)
        }
        Ty::Array(of, size) => {
            let size = size.as_deref().unwrap_or_default();
            declare(structs, of, &format!("{name}[{size}]"))
        }
        Ty::Func(func) => {
            let params = match &func.params {
                None => String::new(),
                Some(params) if params.is_empty() && !func.variadic => "void".into(),
                Some(params) => {
                    let list = params.iter().map(|(name, ty)| declare(structs, ty, name));
                    let dots = func.variadic.then(|| "...".to_owned());
                    list.chain(dots).collect::<Vec<_>>().join(", ")
                }
            };
            declare(structs, &func.ret, &format!("{name}({params})"))
        }
        Ty::Qualified(word, to) => match **to {
            // After the star, where a pointer is qualified itself.
            Ty::Ptr(_, Reach::Local) => declare(structs, to, &format!("{word} {name}")),
            _ => format!("{word} {}", declare(structs, to, name)),
        },
        Ty::Unknown => joined("int"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_are_those_of_c() {
        let array = Ty::Array(Rc::new(Ty::int()), Some("n".into()));
        let func = |ret: Ty, params| Ty::Func(Rc::new(Func { ret, params, variadic: false }));
        for (ty, text) in [
            (Ty::local_ptr(array.clone()), "int (*x)[n]"),
            (Ty::Array(Rc::new(Ty::local_ptr(Ty::int())), None), "int *x[]"),
            (Ty::global_ptr(array.clone()), "quipu_gp x"),
            (Ty::local_ptr(Ty::spread_ptr(Ty::int())), "quipu_sp *x"),
            (Ty::local_ptr(func(Ty::Void, Some(Vec::new()))), "void (*x)(void)"),
            (func(Ty::local_ptr(Ty::int()), None), "int *x()"),
            (
                Ty::Qualified(
                    "const".into(),
                    Rc::new(Ty::local_ptr(Ty::Qualified(
                        "const".into(),
                        Rc::new(Ty::arith("char")),
                    ))),
                ),
                "const char *const x",
            ),
        ] {
            assert_eq!(declare(&[], &ty, "x"), text);
        }
    }
}
