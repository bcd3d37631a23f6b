//! Makes the exports of the library from `symbols.txt`.

fn main() {
    quipu_abi_exports::build("libvipl.so.1");
}
