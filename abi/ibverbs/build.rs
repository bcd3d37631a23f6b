//! Makes the exports of the library from `symbols.txt`.

fn main() {
    quipu_abi_exports::build("libibverbs.so.1");
}
