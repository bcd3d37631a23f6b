/* Linked with every Split-C program: calls splitc_main in every process. */
struct quipu_sc_state;
struct quipu_sc_state *quipu_sc;
extern int splitc_main();
int quipu_sc_run(int argc, char **argv, int (*program)(), struct quipu_sc_state **state, unsigned version);
int main(int argc, char **argv)
{
    return quipu_sc_run(argc, argv, splitc_main, &quipu_sc, 1);
}
