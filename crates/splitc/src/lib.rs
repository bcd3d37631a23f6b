//! The Split-C compiler: translates Split-C to C, and calls the system's compiler.
//!
//! | module | does |
//! |---|---|
//! | `lex` | tokens of preprocessed C |
//! | `types` | types, and how C writes them |
//! | `translate` | parses Split-C and writes C |
//! | [`driver`] | `quipu splitc cc`: preprocessor, translator, compiler, linker |
//!
//! [`translate`] has no I/O. The run-time library, which programs are linked with, is `abi/splitc`;
//! `docs/split-c.md` describes the language.
#![forbid(unsafe_code)]

pub mod driver;
mod error;
mod lex;
mod translate;
mod types;

pub use error::Error;
pub use lex::join_strings;
pub use translate::translate;
