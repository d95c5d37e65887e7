void train();

int main() { train(); }
