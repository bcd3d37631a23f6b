//! Makes the exports of the library from `symbols.txt`.

fn main() {
    quipu_abi_exports::build("libqpip.so.1");
    // What is linked into it has C symbols of its own, which are nobody's business.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
}
