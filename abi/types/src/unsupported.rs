//! Tables of engines that lack a part.

/// Gives a part of the engine's table the constant `NONE`, in which every function answers NotSupported.
macro_rules! unsupported {
    ($table:ident: $doc:literal; $($name:ident($($ty:ty),*);)*) => {
        impl $table {
            #[doc = $doc]
            pub const NONE: Self = {
                $(extern "C" fn $name($(_: $ty),*) -> i32 {
                    EngineStatus::NotSupported.code()
                })*
                Self { $($name,)* }
            };
        }
    };
}
