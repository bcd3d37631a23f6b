//! The engine without a network of the unit tests, as a library that the facade can load.
#![allow(missing_docs)]

#[path = "../../src/tests/null_engine.rs"]
mod null_engine;

/// The symbol that the facade looks for.
#[unsafe(no_mangle)]
pub extern "C" fn quipu_engine_api_v1() -> *const quipu_abi_types::EngineApi {
    &raw const null_engine::API
}
